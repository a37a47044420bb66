"""Fetches samples in a fork of this process, which is like a worker of a loader, to see what they draw.

The program itself fetches nothing more, and its generators and its data set stay as they are.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import location_parts, user_line
from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# draws that choose an order may be the same for every sample on purpose
ORDERS = frozenset(
    {"randperm", "permutation", "permuted", "shuffle", "choice", "choices", "sample", "multinomial"}
)
Place = tuple[str, int, str]


def samples_in_worker(
    torch: ModuleType, loader: DataLoader, number: int, seed: int, index: Any, times: int
) -> Any:
    """In a fork: digests of one sample, the states at the start, and the places that seeded global generators."""
    worker, recorder = torch.utils.data._utils.worker, Recorder(torch)
    torch.set_num_threads(1)
    seed_all(torch, seed)
    worker._worker_info = worker.WorkerInfo(
        id=number, num_workers=loader.num_workers, seed=seed, dataset=loader.dataset
    )
    if loader.worker_init_fn is not None:
        recorder.patch_seeds()
        loader.worker_init_fn(number)
    begun = states(torch)
    return [hashed(loader.dataset[index]) for _ in range(times)], begun, recorder.seeds


def draws_of_samples(torch: ModuleType, dataset: Any, indices: list[Any]) -> Any:
    """In a fork: the states after each sample, the places that seeded global generators, and the draws of each."""
    recorder, after, draws, seeds = Recorder(torch), [], [], dict[str, Place]()
    torch.set_num_threads(1)
    recorder.patch_seeds()
    recorder.patch_generators()
    with recorder.mode():
        for number, index in enumerate(indices):
            seed_all(torch, 1000 + number)
            recorder.seeds, recorder.draws = seeds, []
            dataset[index]
            after.append(states(torch))
            draws.append(recorder.draws)
    return after, seeds, draws


def seed_all(torch: ModuleType, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def states(torch: ModuleType) -> dict[str, str]:
    """A digest of the state of each global generator."""
    found = {"torch": hashed(torch.get_rng_state()), "random": hashed(random.getstate())}
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy.random"] = hashed(list(numpy.random.get_state()))
    return found


def hashed(value: Any) -> str:
    """A digest of the numbers in a sample."""
    from torch.utils._pytree import tree_leaves

    sha = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(value):
        leaf = leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else leaf
        sha.update(leaf.tobytes() if hasattr(leaf, "tobytes") else repr(leaf).encode())
    return sha.hexdigest()


class Recorder:
    """Records, in a fork, the lines that set global seeds, and what is drawn from generators that a sample makes."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch, self.ledger = torch, Ledger()
        self.seeds: dict[str, Place] = {}  # the global generator -> where it was seeded last
        self.draws: list[tuple[str, Place]] = []  # digest of what was drawn, where
        self.drawing = False

    def patch_seeds(self) -> None:
        numpy: Any = sys.modules.get("numpy")
        for module, name in ((random, "seed"), (self.torch, "manual_seed"), (numpy and numpy.random, "seed")):
            if module is not None:
                self.ledger.set(module, name, partial(self.seeded, module.__name__, getattr(module, name)))

    def patch_generators(self) -> None:
        self.ledger.set(random, "Random", self.recording(random.Random))
        if (numpy := sys.modules.get("numpy")) is not None:
            make, kind = numpy.random.default_rng, self.recording(numpy.random.Generator)
            self.ledger.set(numpy.random, "RandomState", self.recording(numpy.random.RandomState))
            self.ledger.set(
                numpy.random, "default_rng", lambda *args, **kwargs: kind(make(*args, **kwargs).bit_generator)
            )

    def recording(self, kind: type[Any]) -> type[Any]:
        """A subclass of generators that tells what is drawn."""
        recorder = self

        class Recording(kind):
            def __getattribute__(self, name: str) -> Any:
                value = super().__getattribute__(name)
                if (
                    name.startswith("_")
                    or name in ("seed", "bit_generator")
                    or recorder.drawing
                    or not callable(value)
                ):
                    return value

                def draw(*args: Any, **kwargs: Any) -> Any:
                    recorder.drawing = True  # a draw may call other methods
                    try:
                        result = value(*args, **kwargs)
                    finally:
                        recorder.drawing = False
                    recorder.drawn(name, result)
                    return result

                return draw

        return Recording

    def mode(self) -> Any:
        """Records the draws of torch's functions from a generator that they are given."""
        recorder = self

        class Mode(self.torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = function(*args, **(kwargs or {}))
                if (kwargs or {}).get("generator") is not None and isinstance(result, recorder.torch.Tensor):
                    recorder.drawn(function.__name__, result)
                return result

        return Mode()

    def seeded(self, name: str, seed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.seeds[name] = user_place()
        return seed(*args, **kwargs)

    def drawn(self, name: str, value: Any) -> None:
        if name not in ORDERS and value is not None:
            self.draws.append((hashed(value), user_place()))


def user_place() -> Place:
    line = user_line(sys._getframe(1))
    return location_parts(line) if line is not None else ("", 0, "")
