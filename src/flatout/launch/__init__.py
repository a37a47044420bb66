"""Room 1: understands a command, prepares its environment, starts and supervises it."""
