from pathlib import Path

assert Path("greeting.txt").read_text().count("\n") == 1
