"""Room 4: chooses between Plans."""
