"""Inspect the machine and the script without changing anything. Works with torch broken or absent."""
