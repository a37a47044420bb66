"""Write and restore checkpoints exactly.

A checkpoint is a folder that verifies completely, or it does not count.
"""
