"""Exact resume of an unmodified script.

A replay runs the script's control flow again, on fake tensors without values, up to the step of a checkpoint.
"""
