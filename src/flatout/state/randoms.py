"""All that a training draws random numbers from: torch's generators, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from typing import Any

from flatout.plan.errors import SaveError


def random_states(torch: Any) -> dict[str, Any]:
    """As they are now. Those of CUDA devices where CUDA is in use; numpy's where it was imported."""
    numpy = sys.modules.get("numpy")
    found = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = list(torch.cuda.get_rng_state_all())
    if numpy is not None:
        found["numpy"] = numpy.random.get_state()
    return found


def set_random_states(torch: Any, states: dict[str, Any]) -> list[str]:
    """Put them back; sentences about what could not be. Raises SaveError for what are no such states."""
    try:
        return _set(torch, states)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError, IndexError) as error:
        raise SaveError(f"the states of random numbers in it cannot be taken up ({type(error).__name__}: {str(error)[:200]}).") from None


def _set(torch: Any, states: dict[str, Any]) -> list[str]:
    random.setstate(states["python"])
    torch.default_generator.set_state(states["torch"])
    said = []
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number, state in enumerate(states.get("cuda", ())):
        if number < devices:
            torch.cuda.set_rng_state(state, number)
        else:
            said.append(f"the random numbers of CUDA device {number} go on nowhere: there are {devices} devices now")
    return said
