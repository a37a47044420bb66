"""Answers of `torch.cuda` to a script that `--device cpu` has redirected.

All work is done at once, and no memory is used on a card. Random numbers come from the CPU's own generator.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import is_torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device

NO_OPS = (
    "synchronize",
    "set_device",
    "set_device_index",
    "empty_cache",
    "ipc_collect",
    "init",
    "set_stream",
    "set_sync_debug_mode",
    "set_per_process_memory_fraction",
)
RETURN_ZERO = (
    "current_device",
    "current_device_index",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "utilization",
    "get_sync_debug_mode",
)
RETURN_COUNTER = ("memory_stats", "memory_stats_as_nested_dict", "host_memory_stats")


def no_op(*args: object, **kwargs: object) -> None:
    """Do nothing: nothing is queued, cached or counted on the CPU."""


def zero(*args: object, **kwargs: object) -> int:
    return 0


class Event:
    """A moment of the host clock: on the CPU, all earlier work is done when it is recorded."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._time_s = 0.0

    def record(self, stream: object = None) -> None:
        self._time_s = sys.modules["time"].perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return milliseconds."""
        return float(end_event._time_s - self._time_s) * 1e3

    wait = synchronize = no_op


class Stream:
    """The one order in which the CPU computes."""

    cuda_stream = priority = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Any:
        event = Event() if event is None else event
        event.record()
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    wait_event = wait_stream = synchronize = no_op


class NoOpContext:
    """A context that selects a device or a stream: there is only one, so it does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Runtime:
    """Replaces `torch.cuda.cudart()`: every call succeeds."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return zero


def host_answers(torch: ModuleType) -> dict[str, Any]:
    """Return replacements by name for the functions and classes of `torch.cuda` and similar modules."""
    memory = tuple(
        os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") if name in os.sysconf_names else 0
        for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
    )
    properties = SimpleNamespace(
        name="CPU", major=0, minor=0, total_memory=memory[1], multi_processor_count=os.cpu_count() or 1
    )
    stream = type("Stream", (Stream,), {"device": torch.device("cpu")})
    seeds = {torch.initial_seed()}  # the seed of a script that has not seeded torch

    def seed(seed: int) -> None:
        """Seed the CPU if the script seeds only `torch.cuda`; after `torch.manual_seed`, do nothing."""
        if is_torch(sys._getframe(2).f_code.co_filename):  # `torch.manual_seed`
            seeds.clear()
        elif torch.initial_seed() in seeds:
            seeds.add(seed)
            torch.default_generator.manual_seed(seed)

    def set_state(state: Tensor, device: Device = None) -> None:
        if state.shape == torch.get_rng_state().shape:  # the state of a card has another shape
            torch.set_rng_state(state)

    def set_states(states: Iterable[Tensor]) -> None:
        for state in states:
            set_state(state)

    return {
        **dict.fromkeys((*NO_OPS, *(name for name in dir(torch.cuda) if name.startswith("reset_"))), no_op),
        **dict.fromkeys(RETURN_ZERO, zero),
        **dict.fromkeys(RETURN_COUNTER, lambda device=None: Counter()),
        **dict.fromkeys(("memory_summary", "list_gpu_processes"), lambda *args, **kwargs: ""),
        "memory_snapshot": lambda *args, **kwargs: [],
        "mem_get_info": lambda device=None: memory,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": list,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "make_graphed_callables": lambda callables, *args, **kwargs: callables,
        "cudart": Runtime,
        **dict.fromkeys(("current_stream", "default_stream"), lambda device=None: torch.cuda.Stream()),
        **dict.fromkeys(("Stream", "ExternalStream"), stream),
        "Event": Event,
        **dict.fromkeys(("stream", "StreamContext", "device", "device_of"), NoOpContext),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), seed),
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": set_state,
        "set_rng_state_all": set_states,
    }
