"""Room 5: the only room that prints or exits; one command a file."""
