"""Parses a command, prepares its environment, starts and supervises it."""
