"""Inspects an exception in the living process, and records details missing from the traceback.

It computes nothing on a device and keeps nothing: shapes, dtypes, names, and the extremes of small integer
CPU tensors.
"""

from __future__ import annotations

import gc
import linecache
import os
import re
import site
import sys
import sysconfig
import traceback
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from flatout.agent.names import inside
from flatout.schema.facts import DEVICE_VARIABLE
from flatout.schema.failure import ExceptionRecord, FailureRecord, FrameRecord, ModuleRecord, TensorRecord

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

MOST_FRAMES = 200
MOST_TENSORS = 12
MOST_ENTRIES = 1 << 22  # of an integer tensor whose minimum and maximum are read
MOST_CHARACTERS = 20_000
MOST_NODES = 20_000  # of an autograd graph
NODE = re.compile(r"(?:Function '|output \d+ of )(\w+?)(?:Backward\d*)?[',]")
WORD = re.compile(r"[A-Za-z_]\w*")
OF_A_GPU = re.compile(r"\bGPU (\d+)\b")


def look(error: BaseException) -> FailureRecord:
    """Return every available detail. Raises nothing: unavailable details are left out."""
    record = FailureRecord(live=True)
    for link, thrown in _chain(error):
        record.chain.insert(0, _thrown(thrown, link))
    torch = sys.modules.get("torch")
    for add in (_processes, _memory, _module, _batch, _forward_call, _unguarded):
        try:
            add(record, error, torch)
        except Exception:
            continue  # the process is dying: any part of it may be broken
    return record


def _chain(error: BaseException) -> list[tuple[str, BaseException]]:
    found: list[tuple[str, BaseException]] = []
    link, now = "", error
    while len(found) < 10 and all(now is not other for _, other in found):
        found.append((link, now))
        if now.__cause__ is not None:
            link, now = "cause", now.__cause__
        elif now.__context__ is not None and not now.__suppress_context__:
            link, now = "context", now.__context__
        else:
            break
    return found


def _thrown(error: BaseException, link: str) -> ExceptionRecord:
    kind = type(error)
    frames = list(traceback.walk_tb(error.__traceback__))
    if len(frames) > MOST_FRAMES:
        frames = frames[: MOST_FRAMES // 2] + frames[-MOST_FRAMES // 2 :]
    seen = [_frame(frame, line) for frame, line in frames]
    last = max((at for at, frame in enumerate(seen) if frame.is_user_code), default=len(seen))
    for at in range(last, len(seen)):
        try:
            seen[at].tensors = _tensors(frames[at][0], _statement(*frames[at]))
        except Exception:
            continue
    try:
        message = str(error)[:MOST_CHARACTERS]
    except Exception:
        message = ""
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    notes = [str(note)[:1000] for note in getattr(error, "__notes__", None) or ()]
    return ExceptionRecord(name, [one.__name__ for one in kind.__mro__[:-2]], message, notes, seen, link)


def _frame(frame: FrameType, line: int) -> FrameRecord:
    file = frame.f_code.co_filename
    return FrameRecord(
        file,
        line,
        frame.f_code.co_name,
        linecache.getline(file, line, frame.f_globals).strip(),
        _is_mine(file),
    )


def _statement(frame: FrameType, line: int) -> str:
    """Return the line with the lines after it: a call may span several."""
    return " ".join(
        linecache.getline(frame.f_code.co_filename, at, frame.f_globals).strip()
        for at in range(line, line + 4)
    )


def _is_mine(file: str) -> bool:
    if file.startswith("<") and not file.startswith("<ipython"):
        return file in ("<stdin>", "<string>")
    return not os.path.abspath(file).startswith(_FOREIGN)


def _foreign() -> tuple[str, ...]:
    paths = {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        site.getusersitepackages(),
        os.path.dirname(os.path.dirname(__file__)),
    }
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch:
        paths.add(os.path.dirname(torch))
    paths -= {sysconfig.get_path("scripts"), sysconfig.get_path("data")}
    both = {os.path.abspath(path) for path in paths} | {os.path.realpath(path) for path in paths}
    return tuple(os.path.join(path, "") for path in both)


_FOREIGN = _foreign()


def _tensors(frame: FrameType, statement: str) -> list[TensorRecord]:
    """Return the tensors that the failing line names, then the others of the frame."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    named = [word for word in dict.fromkeys(WORD.findall(statement)) if word in frame.f_locals]
    found: list[TensorRecord] = []
    for name in [*named, *(name for name in list(frame.f_locals) if name not in named)]:
        value = frame.f_locals[name]
        parts = [(name, value), *inside(name, value)]
        found += [_tensor(part, each, torch) for part, each in parts if isinstance(each, torch.Tensor)]
        if len(found) >= MOST_TENSORS:
            break
    return found[:MOST_TENSORS]


def _tensor(name: str, value: Tensor, torch: ModuleType) -> TensorRecord:
    seen = TensorRecord(
        name,
        [int(size) for size in value.shape],
        str(value.dtype).removeprefix("torch."),
        str(value.device),
        bool(value.requires_grad),
    )
    whole = not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool
    if (
        whole
        and value.device.type == "cpu"
        and type(value) is torch.Tensor
        and 0 < value.numel() <= MOST_ENTRIES
    ):
        flat = value.detach().reshape(-1)
        read = torch._C.TensorBase.item  # bypasses hooks on tensor reads
        low, high = read(flat.argmin()), read(flat.argmax())
        seen.low, seen.high = read(flat[low]), read(flat[high])
        seen.argmin, seen.argmax = _unravel(low, seen.shape), _unravel(high, seen.shape)
    return seen


def _unravel(at: int, shape: list[int]) -> list[int]:
    found: list[int] = []
    for size in reversed(shape):
        at, rest = divmod(at, size)
        found.insert(0, rest)
    return found


# -- process state -----------------------------------------------------------------------------------------


def _processes(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    for name, key in (("RANK", "rank"), ("WORLD_SIZE", "world_size")):
        value = os.environ.get(f"FLATOUT_{name}") or os.environ.get(name, "")
        if value.isdigit():
            record.__dict__[key] = int(value)
    if asked := os.environ.get(DEVICE_VARIABLE):
        record.facts["device"] = asked
    record.facts["python"] = sys.version.split()[0]
    if torch is not None:
        record.facts["torch"] = str(torch.__version__)
        record.facts["cuda"] = torch.version.cuda or ""


def _memory(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    """Record the bytes on the device that the error names, or the fullest one, and what holds them.

    Asks only if CUDA is in use: asking would initialise it.
    """
    if torch is None or not torch.cuda.is_initialized():
        return
    devices = range(torch.cuda.device_count())
    named = OF_A_GPU.search(str(error))
    device = (
        int(named[1])
        if named is not None and int(named[1]) in devices
        else max(devices, key=torch.cuda.memory_allocated)
    )
    record.facts["gpu"] = torch.cuda.get_device_name(device)
    record.facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    record.facts["built_for"] = " ".join(torch.cuda.get_arch_list())
    free, total = torch.cuda.mem_get_info(device)
    statistics = torch.cuda.memory_stats(device)
    record.memory = {
        "free": free,
        "total": total,
        "allocated": statistics.get("allocated_bytes.all.current", 0),
        "reserved": statistics.get("reserved_bytes.all.current", 0),
    }
    kept: dict[str, dict[int, int]] = {"parameters": {}, "gradients": {}, "optimizer state": {}}

    def keep(kind: str, value: object) -> None:
        if isinstance(value, torch.Tensor) and value.device == torch.device("cuda", device):
            storage = value.untyped_storage()
            kept[kind][storage.data_ptr()] = storage.nbytes()

    for thing in gc.get_objects():
        # type() instead of isinstance(): the __class__ of a foreign object may run code and warn
        if issubclass(type(thing), torch.nn.Parameter):
            keep("parameters", thing.data)
            keep("gradients", thing.grad)
        elif issubclass(type(thing), torch.optim.Optimizer):
            for state in thing.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    keep("optimizer state", value)
    record.memory.update({kind: sum(storages.values()) for kind, storages in kept.items()})


def _module(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    """Record which layer was running, by its path in the outermost module on the stack."""
    if torch is None:
        return
    error = _root(error)
    running, root, called = None, None, ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        self = frame.f_locals.get("self")
        if isinstance(self, torch.nn.Module) and not frame.f_code.co_name.startswith("__init__"):
            running = self
            if root is None:
                root, called = self, _name_of(self, error.__traceback__)
    if running is None or root is None:
        return
    path = next((name for name, module in root.named_modules() if module is running), "")
    shapes = {
        name: [int(size) for size in value.shape] for name, value in running.named_parameters(recurse=False)
    }
    record.module = ModuleRecord(".".join(filter(None, (called, path))), type(running).__name__, shapes)


def _root(error: BaseException) -> BaseException:
    return _chain(error)[-1][1]


def _name_of(module: Module, trace: TracebackType | None) -> str:
    """Return the name of the module in the user's own frame."""
    for frame, _ in traceback.walk_tb(trace):
        if _is_mine(frame.f_code.co_filename):
            for name, value in frame.f_locals.items():
                if value is module and name != "self":
                    return name
    return ""


def _batch(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    """Record the number of the batch, if exactly one loader is in use."""
    loading = sys.modules.get("torch.utils.data.dataloader")
    if loading is None:
        return
    given = [
        thing._num_yielded
        for thing in gc.get_objects()
        if issubclass(type(thing), loading._BaseDataLoaderIter)
    ]
    if len(given) == 1 and given[0]:
        record.batch = given[0] - 1


def _unguarded(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    """Record that the workers of a loader import the script again, which has no main guard."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    for frame, _ in traceback.walk_tb(error.__traceback__) if script else ():
        for worker in getattr(frame.f_locals.get("self"), "_workers", ()):
            if worker._popen.method != "fork":
                record.facts["unguarded"] = "__name__" not in "".join(linecache.getlines(str(script)))
                return


def _forward_call(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    """Record the forward call of the failing operation; anomaly mode stores it in the graph."""
    named = NODE.search(str(error))
    if torch is None or named is None:
        return
    values = [
        value
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for value in list(frame.f_locals.values())
        if isinstance(value, torch.Tensor)
    ]
    nodes, known = [value.grad_fn for value in values if value.grad_fn is not None], set[Any]()
    while nodes and len(known) < MOST_NODES:
        node = nodes.pop()
        if node in known:
            continue
        known.add(node)
        call = node.metadata.get("traceback_") if node.name().startswith(f"{named[1]}Backward") else None
        if call:
            lines = "".join(call).rstrip().split("\n")
            record.log_lines += [
                f"Error detected in {node.name()}. Traceback of forward call that caused the error:",
                *lines,
            ]
            return
        nodes += [following for following, _ in node.next_functions if following is not None]
