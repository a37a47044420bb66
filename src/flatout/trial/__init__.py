"""One measured run of a program: its folder, its worker inside the program, and its parent outside."""
