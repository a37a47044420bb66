"""Applies a Plan to a training context in a fixed order and guards it. Imports no lever."""
