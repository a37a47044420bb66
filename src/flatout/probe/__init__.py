"""Room 1: looks and touches nothing. Works with torch broken or absent."""
