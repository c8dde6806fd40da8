cat /app/name.txt
