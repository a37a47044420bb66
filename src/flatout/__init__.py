"""flatout: a PyTorch training program, as it is, as fast as the machine allows, with the same results.

Importing flatout imports neither torch nor anything else that is heavy; `Loop`, `Pipeline`, `Step`, `Plan`, `device` and `seed` are loaded when asked for.
"""

__version__ = "0.1.0"

_LAZY = {"Loop": "flatout.loop.loop", "Pipeline": "flatout.loop.pipeline_parallel", "Step": "flatout.loop.step", "Plan": "flatout.plan.plan",
         "device": "flatout.loop.start", "seed": "flatout.loop.start"}


def __getattr__(name: str) -> object:
    """The library's names, loaded when they are asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
