"""Room 4: turns what was read, measured or thrown into Findings. Adding a rule is one file in rules/ and one line in its table."""
