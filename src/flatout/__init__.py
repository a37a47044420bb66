"""flatout: a PyTorch training program, as it is, as fast as the machine allows, with the same results.

Importing flatout imports neither torch nor anything else that is heavy.
"""

__version__ = "0.1.0"
