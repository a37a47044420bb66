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

from flatout.agent.names import named_items
from flatout.schema.facts import DEVICE_VARIABLE
from flatout.schema.failure import ExceptionRecord, FailureRecord, FrameRecord, ModuleRecord, TensorRecord

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

MAX_FRAMES = 200
MAX_TENSORS = 12
MAX_INTEGER_ENTRIES = 1 << 22  # of an integer tensor whose minimum and maximum are read
MAX_MESSAGE_CHARS = 20_000
MAX_NODES = 20_000  # of an autograd graph
NODE = re.compile(r"(?:Function '|output \d+ of )(\w+?)(?:Backward\d*)?[',]")
WORD = re.compile(r"[A-Za-z_]\w*")
GPU_NUMBER = re.compile(r"\bGPU (\d+)\b")


def record_failure(error: BaseException) -> FailureRecord:
    """Return every available detail. Raises nothing: unavailable details are left out."""
    record = FailureRecord(live=True)
    for link, thrown in _chain(error):
        record.chain.insert(0, _exception_record(thrown, link))
    torch = sys.modules.get("torch")
    for collect in (_processes, _memory, _module, _batch, _forward_call, _missing_main_guard):
        try:
            collect(record, error, torch)
        except Exception:
            continue  # the process is dying: any part of it may be broken
    return record


def _chain(error: BaseException) -> list[tuple[str, BaseException]]:
    chain: list[tuple[str, BaseException]] = []
    link, current = "", error
    while len(chain) < 10 and all(current is not other for _, other in chain):
        chain.append((link, current))
        if current.__cause__ is not None:
            link, current = "cause", current.__cause__
        elif current.__context__ is not None and not current.__suppress_context__:
            link, current = "context", current.__context__
        else:
            break
    return chain


def _exception_record(error: BaseException, link: str) -> ExceptionRecord:
    kind = type(error)
    frames = list(traceback.walk_tb(error.__traceback__))
    if len(frames) > MAX_FRAMES:
        frames = frames[: MAX_FRAMES // 2] + frames[-MAX_FRAMES // 2 :]
    records = [_frame(frame, line) for frame, line in frames]
    last_user_frame = max((i for i, frame in enumerate(records) if frame.is_user_code), default=len(records))
    for i in range(last_user_frame, len(records)):
        try:
            records[i].tensors = _tensors(frames[i][0], _statement(*frames[i]))
        except Exception:
            continue
    try:
        message = str(error)[:MAX_MESSAGE_CHARS]
    except Exception:
        message = ""
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    notes = [str(note)[:1000] for note in getattr(error, "__notes__", None) or ()]
    return ExceptionRecord(name, [base.__name__ for base in kind.__mro__[:-2]], message, notes, records, link)


def _frame(frame: FrameType, line: int) -> FrameRecord:
    file = frame.f_code.co_filename
    return FrameRecord(
        file,
        line,
        frame.f_code.co_name,
        linecache.getline(file, line, frame.f_globals).strip(),
        _is_user_file(file),
    )


def _statement(frame: FrameType, line: int) -> str:
    return " ".join(
        linecache.getline(frame.f_code.co_filename, number, frame.f_globals).strip()
        for number in range(line, line + 4)
    )


def _is_user_file(file: str) -> bool:
    if file.startswith("<") and not file.startswith("<ipython"):
        return file in ("<stdin>", "<string>")
    return not os.path.abspath(file).startswith(_LIBRARY_DIRS)


def _library_dirs() -> tuple[str, ...]:
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
    real_and_absolute = {os.path.abspath(path) for path in paths} | {os.path.realpath(path) for path in paths}
    return tuple(os.path.join(path, "") for path in real_and_absolute)


_LIBRARY_DIRS = _library_dirs()


def _tensors(frame: FrameType, statement: str) -> list[TensorRecord]:
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    named = [word for word in dict.fromkeys(WORD.findall(statement)) if word in frame.f_locals]
    tensors: list[TensorRecord] = []
    for name in [*named, *(name for name in list(frame.f_locals) if name not in named)]:
        value = frame.f_locals[name]
        parts = [(name, value), *named_items(name, value)]
        tensors += [_tensor(part, item, torch) for part, item in parts if isinstance(item, torch.Tensor)]
        if len(tensors) >= MAX_TENSORS:
            break
    return tensors[:MAX_TENSORS]


def _tensor(name: str, value: Tensor, torch: ModuleType) -> TensorRecord:
    tensor = TensorRecord(
        name,
        [int(size) for size in value.shape],
        str(value.dtype).removeprefix("torch."),
        str(value.device),
        bool(value.requires_grad),
    )
    is_integer = (
        not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool
    )
    if (
        is_integer
        and value.device.type == "cpu"
        and type(value) is torch.Tensor
        and 0 < value.numel() <= MAX_INTEGER_ENTRIES
    ):
        flat = value.detach().reshape(-1)
        read_item = torch._C.TensorBase.item  # bypasses hooks on tensor reads
        low, high = read_item(flat.argmin()), read_item(flat.argmax())
        tensor.low, tensor.high = read_item(flat[low]), read_item(flat[high])
        tensor.argmin, tensor.argmax = _unravel(low, tensor.shape), _unravel(high, tensor.shape)
    return tensor


def _unravel(flat_index: int, shape: list[int]) -> list[int]:
    indices: list[int] = []
    for size in reversed(shape):
        flat_index, index = divmod(flat_index, size)
        indices.insert(0, index)
    return indices


# -- process state


def _processes(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    for name, key in (("RANK", "rank"), ("WORLD_SIZE", "world_size")):
        value = os.environ.get(f"FLATOUT_{name}") or os.environ.get(name, "")
        if value.isdigit():
            record.__dict__[key] = int(value)
    if asked_device := os.environ.get(DEVICE_VARIABLE):
        record.facts["device"] = asked_device
    record.facts["python"] = sys.version.split()[0]
    if torch is not None:
        record.facts["torch"] = str(torch.__version__)
        record.facts["cuda"] = torch.version.cuda or ""


def _memory(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    if torch is None or not torch.cuda.is_initialized():
        return
    devices = range(torch.cuda.device_count())
    gpu = GPU_NUMBER.search(str(error))
    device = (
        int(gpu[1])
        if gpu is not None and int(gpu[1]) in devices
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
    storages: dict[str, dict[int, int]] = {"parameters": {}, "gradients": {}, "optimizer state": {}}

    def add(kind: str, value: object) -> None:
        if isinstance(value, torch.Tensor) and value.device == torch.device("cuda", device):
            storage = value.untyped_storage()
            storages[kind][storage.data_ptr()] = storage.nbytes()

    for thing in gc.get_objects():
        # type() instead of isinstance(): the __class__ of a foreign object may run code and warn
        if issubclass(type(thing), torch.nn.Parameter):
            add("parameters", thing.data)
            add("gradients", thing.grad)
        elif issubclass(type(thing), torch.optim.Optimizer):
            for state in thing.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    add("optimizer state", value)
    record.memory.update({kind: sum(sizes.values()) for kind, sizes in storages.items()})


def _module(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    if torch is None:
        return
    error = _first_error(error)
    running, root, root_name = None, None, ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        self = frame.f_locals.get("self")
        if isinstance(self, torch.nn.Module) and not frame.f_code.co_name.startswith("__init__"):
            running = self
            if root is None:
                root, root_name = self, _name_of(self, error.__traceback__)
    if running is None or root is None:
        return
    path = next((name for name, module in root.named_modules() if module is running), "")
    shapes = {
        name: [int(size) for size in value.shape] for name, value in running.named_parameters(recurse=False)
    }
    record.module = ModuleRecord(".".join(filter(None, (root_name, path))), type(running).__name__, shapes)


def _first_error(error: BaseException) -> BaseException:
    return _chain(error)[-1][1]


def _name_of(module: Module, trace: TracebackType | None) -> str:
    for frame, _ in traceback.walk_tb(trace):
        if _is_user_file(frame.f_code.co_filename):
            for name, value in frame.f_locals.items():
                if value is module and name != "self":
                    return name
    return ""


def _batch(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    loading = sys.modules.get("torch.utils.data.dataloader")
    if loading is None:
        return
    yielded = [
        thing._num_yielded
        for thing in gc.get_objects()
        if issubclass(type(thing), loading._BaseDataLoaderIter)
    ]
    if len(yielded) == 1 and yielded[0]:
        record.batch = yielded[0] - 1


def _missing_main_guard(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    script = getattr(sys.modules["__main__"], "__file__", None)
    for frame, _ in traceback.walk_tb(error.__traceback__) if script else ():
        for worker in getattr(frame.f_locals.get("self"), "_workers", ()):
            if worker._popen.method != "fork":
                record.facts["missing_main_guard"] = "__name__" not in "".join(
                    linecache.getlines(str(script))
                )
                return


def _forward_call(record: FailureRecord, error: BaseException, torch: ModuleType | None) -> None:
    named = NODE.search(str(error))
    if torch is None or named is None:
        return
    values = [
        value
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for value in list(frame.f_locals.values())
        if isinstance(value, torch.Tensor)
    ]
    nodes, visited = [value.grad_fn for value in values if value.grad_fn is not None], set[Any]()
    while nodes and len(visited) < MAX_NODES:
        node = nodes.pop()
        if node in visited:
            continue
        visited.add(node)
        call = node.metadata.get("traceback_") if node.name().startswith(f"{named[1]}Backward") else None
        if call:
            lines = "".join(call).rstrip().split("\n")
            record.log_lines += [
                f"Error detected in {node.name()}. Traceback of forward call that caused the error:",
                *lines,
            ]
            return
        nodes += [next_node for next_node, _ in node.next_functions if next_node is not None]
