"""Compares what programs computed."""


def distance(a, b):
    """The distance of two lists of vectors, relative to the length of the second."""
    pairs = [(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)]
    return (sum((x - y) ** 2 for x, y in pairs) / (sum(y * y for _, y in pairs) or 1.0)) ** 0.5
