"""Room 3: one measured run of a program: its folder, its worker inside the program, its parent outside."""
