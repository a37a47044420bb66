"""Saves and restores exactly. A save is a folder that can be believed, or it is none."""
