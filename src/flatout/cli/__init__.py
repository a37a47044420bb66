"""The command line. Only this package prints or exits; each command has its own file."""
