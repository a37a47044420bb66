"""Invariants of a running training program, one a file: the class, and its page as the docstring."""
