"""flatout makes a PyTorch training program as fast as the machine allows, with the same results.

The public names are `Loop`, `Step`, `Plan`, `device` and `seed`. They load on first use: `import
flatout` imports neither torch nor any other heavy package.

    import flatout

    flatout.seed(0)
    model = Model().to(flatout.device())
    for step in flatout.Loop(model, optimizer, loss_fn, loader, epochs=3):
        print(step.index, float(step.loss))

PYTEST_DONT_REWRITE: pytest would warn that the package of its plugin was imported before.
"""

__version__ = "0.2.0"

_LAZY = {
    "Loop": "flatout.loop.loop",
    "Step": "flatout.loop.step",
    "Plan": "flatout.schema.plan",
    "read_plan": "flatout.job.folder",
    "device": "flatout.loop.start",
    "seed": "flatout.loop.start",
    "load_ipython_extension": "flatout.integrations.notebook",  # called by %load_ext flatout
}


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
