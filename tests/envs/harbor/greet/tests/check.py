assert open("greeting.txt").read().count("\n") == 1
