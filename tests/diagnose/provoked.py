"""Small programs that really fail, each with its fixed version.

``program(well=False)`` dies and ``program(well=True)`` completes.

    python provoked.py OUT.json [NAME ...]

runs the named programs, or all quick ones, and writes what a dying process would have recorded.

A program marked ``apart`` changes its process (limits, process groups, signals) and gets its own fork.
"""

from __future__ import annotations

import functools
import io
import json
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class Program:
    """``code`` is the expected failure kind; ``says`` are words of the user's program that the cause must
    contain.
    """

    name: str
    code: str
    says: tuple[str, ...]
    run: Callable[[bool], object]
    apart: bool
    tried: str  # why the fixed version is not run; empty where it is
    slow: bool  # provoked by the benchmark, not by the tests
    of_cuda: bool  # only a torch that was built with CUDA fails so


PROGRAMS = {}


def program(code, *says, apart=False, tried="", slow=False, of_cuda=False):
    def keep(run):
        PROGRAMS[run.__name__] = Program(run.__name__, code, says, run, apart, tried, slow, of_cuda)
        return run

    return keep


class Net(torch.nn.Module):
    """A small classifier of 28x28 images; its second part expects ``features``."""

    def __init__(self, features=392, channels=1):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(channels, 8, 3, stride=4), torch.nn.ReLU(), torch.nn.Flatten()
        )
        self.fc1 = torch.nn.Linear(features, 10)

    def forward(self, x):
        return self.fc1(self.body(x))


class Rows(Dataset):
    """Ten rows; ``make(at)`` gives one."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 10

    def __getitem__(self, at):
        return self.make(at)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def group(rank=0, size=1, port=0, timeout_s=5.0):
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port or free_port()), RANK=str(rank), WORLD_SIZE=str(size)
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


# -- devices


@program("FE001", "meta", "cpu", "fc1")
def model_on_another_device(well):
    model = Net()
    model.fc1.to_empty(device="cpu" if well else "meta")
    return model(torch.ones(2, 1, 28, 28))


@program("FE002", of_cuda=True)
def no_driver(well):
    device = "cuda" if torch.cuda.is_available() or not well else "cpu"
    return torch.zeros(3, device=device)


@program("FE007", apart=True, tried="a spawned process needs a GPU to show that it works", of_cuda=True)
def cuda_after_fork(well):
    try:
        torch.cuda.init()
    except RuntimeError:
        pass  # no driver here, but the process counts as one that has used CUDA
    number = os.fork()
    if number == 0:
        raise_in_child(lambda: torch.zeros(1).cuda())
    os.waitpid(number, 0)
    reraise_from_child()


# -- dtypes


@program("FE010", "Linear", "float64", "float32")
def double_input(well):
    numbers = torch.tensor([[0.5] * 392], dtype=torch.float32 if well else torch.float64)
    return Net().fc1(numbers)


@program("FE011", "target")
def float_labels(well):
    target = torch.tensor([1.0, 2.0])
    return F.cross_entropy(torch.zeros(2, 3), target.long() if well else target)


@program("FE011")
def integer_targets_of_a_regression(well):
    wanted = torch.tensor([1, 0, 1])
    guess = torch.zeros(3, requires_grad=True)
    F.huber_loss(guess, wanted.float() if well else wanted).backward()


@program("FE012", "linalg.inv", "float16")
def half_on_the_cpu(well):
    matrix = torch.eye(3).to(torch.float32 if well else torch.float16)
    return torch.linalg.inv(matrix)


@program("FE014")
def bfloat16_to_numpy(well):
    weights = torch.zeros(3, dtype=torch.bfloat16)
    return (weights.float() if well else weights).numpy()


# -- shapes


@program("FE020", "fc1", "392", "128")
def linear_of_another_size(well):
    return Net(features=392 if well else 128)(torch.ones(2, 1, 28, 28))


@program("FE020", "4x3")
def matrices_that_do_not_meet(well):
    a, b = torch.ones(4, 3), torch.ones(4, 3)
    return a @ (b.T if well else b)


@program("FE021", "body.0", "3", "1")
def grey_images_into_a_colour_network(well):
    return Net(channels=1 if well else 3)(torch.ones(2, 1, 28, 28))


@program("FE021")
def numpy_images_have_channels_last(well):
    images = torch.ones(2, 32, 32, 3)
    return torch.nn.Conv2d(3, 4, 3)(images.permute(0, 3, 1, 2) if well else images)


@program("FE022", "8", "4")
def batchnorm_of_another_width(well):
    return torch.nn.BatchNorm1d(8 if well else 4)(torch.ones(2, 8))


@program("FE023")
def batchnorm_of_one_sample(well):
    rows = torch.ones(9, 4)
    loader = DataLoader(rows, batch_size=4, drop_last=well)
    norm = torch.nn.BatchNorm1d(4)
    for batch in loader:
        norm(batch)


@program("FE025", "logits", "mask")
def sizes_that_do_not_broadcast(well):
    logits = torch.ones(4, 10)
    mask = torch.ones(4, 1) if well else torch.ones(4, 7)
    return logits * mask


@program("FE026")
def cat_of_other_sizes(well):
    left, right = torch.ones(4, 3), torch.ones(5, 3)
    return torch.cat([left, right], dim=0 if well else 1)


@program("FE027", "10", "8")
def layer_norm_of_another_width(well):
    return torch.nn.LayerNorm(8 if well else 10)(torch.ones(2, 8))


@program("FE027")
def recurrent_input_of_another_width(well):
    return torch.nn.LSTM(8 if well else 10, 4)(torch.ones(5, 2, 8))


@program("FE027")
def attention_of_another_width(well):
    x = torch.ones(5, 2, 8 if well else 6)
    return torch.nn.MultiheadAttention(8, 2)(x, x, x)


# -- losses


@program("FE030", "tokens", "7", "5")
def token_outside_the_vocabulary(well):
    embedding = torch.nn.Embedding(8 if well else 5, 4)
    tokens = torch.tensor([[0, 1], [7, 2]])
    return embedding(tokens)


@program("FE031", "target", "3")
def label_out_of_range(well):
    target = torch.tensor([0, 1, 3])
    logits = torch.zeros(3, 4 if well else 3)
    return F.cross_entropy(logits, target)


@program("FE032", "8", "4")
def labels_of_another_batch(well):
    logits = torch.zeros(8, 3)
    return F.cross_entropy(logits, torch.zeros(8 if well else 4, dtype=torch.long))


@program("FE033")
def bce_of_another_shape(well):
    guess, wanted = torch.full((8, 1), 0.5), torch.ones(8)
    return torch.nn.BCELoss()(guess, wanted[:, None] if well else wanted)


@program("FE034")
def bce_of_logits(well):
    logits, wanted = torch.tensor([2.0, -1.0]), torch.ones(2)
    return (
        F.binary_cross_entropy_with_logits(logits, wanted) if well else F.binary_cross_entropy(logits, wanted)
    )


# -- memory and files


@program("FE041", apart=True)
def more_than_the_host_has(well):
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    cache = torch.empty((1 << 10) if well else (1 << 36), dtype=torch.uint8)
    return cache.numel()


@program("FE042", apart=True)
def killed_from_outside(well):
    if not well:
        os.kill(os.getpid(), signal.SIGKILL)


@program("FE045", apart=True)
def a_crash_below_python(well):
    if not well:
        os.kill(os.getpid(), signal.SIGSEGV)


# -- autograd


@program("FE060")
def loss_without_grad(well):
    weight = torch.ones(3, requires_grad=True)
    with torch.set_grad_enabled(well):
        loss = (weight * 2).sum()
    loss.backward()


@program("FE061")
def backward_twice(well):
    weight = torch.ones(3, requires_grad=True)
    loss = weight.exp().sum()
    loss.backward(retain_graph=well)
    loss.backward()


@program("FE062", "Exp")
def changed_in_place(well):
    weight = torch.ones(3, requires_grad=True)
    hidden = weight.exp()
    if well:
        hidden = hidden + 1
    else:
        hidden += 1
    hidden.sum().backward()


@program("FE063")
def a_leaf_changed_in_place(well):
    weight = torch.ones(3, requires_grad=True)
    with torch.set_grad_enabled(not well):
        weight -= 0.1


@program("FE064", "losses")
def backward_of_many(well):
    weight = torch.ones(3, requires_grad=True)
    losses = weight * 2
    (losses.mean() if well else losses).backward()


@program("FE065", "Sqrt")
def nan_under_anomaly_detection(well):
    weight = torch.zeros(3, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = torch.sqrt(weight + (1e-6 if well else 0))
        (root * 0).sum().backward()


@program("FE068")
def unscaled_twice(well):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if well:
            scaler.update()


# -- loading


@program("FE070", "KeyError", "worker process 0", apart=True)
def an_error_in_a_worker(well):
    labels = {f"img{at}": at for at in range(10 if well else 4)}
    return [
        batch.sum() for batch in DataLoader(Rows(lambda at: labels[f"img{at}"]), num_workers=1, batch_size=2)
    ]


def dies(at, how, well):
    if (
        at == 0 and not well
    ):  # before any batch is handed over: what the main process would meet then depends on timing
        how()
    return at


@program("FE071", "SIGKILL", apart=True)
def a_worker_that_is_killed(well):
    return list(
        DataLoader(
            Rows(lambda at: dies(at, lambda: os.kill(os.getpid(), signal.SIGKILL), well)), num_workers=1
        )
    )


@program("FE072", "[3]", "[4]")
def samples_of_other_sizes(well):
    return list(DataLoader(Rows(lambda at: torch.ones(3 if well else 3 + at)), batch_size=4))


@program("FE073", "NoneType")
def a_sample_that_is_none(well):
    return list(DataLoader(Rows(lambda at: at if well or at != 3 else None), batch_size=2))


def square(x):
    return x * x


@program("FE074", "lambda")
def a_lambda_for_a_spawned_worker(well):
    work = square if well else lambda x: x * x
    if well:
        return pickle.dumps(work)
    return multiprocessing.get_context("spawn").Process(target=work, args=(2,)).start()


UNGUARDED = """
import json, multiprocessing, sys, traceback
from flatout.agent.failure_details import record_failure

def hear(kind, error, trace):
    json.dump([record_failure(error).to_json(), "".join(traceback.format_exception(kind, error, trace))], open({out!r}, "w"))

def work():
    pass

sys.excepthook = hear
{guard}
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
"""


@program("FE075")
def a_script_without_a_main_guard(well):
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "train.py", Path(folder) / "seen.json"
        script.write_text(
            UNGUARDED.format(out=str(out), guard='if __name__ == "__main__":' if well else "if True:")
        )
        # with an option, the warm process does not become it: its main module could not be spawned
        subprocess.run([sys.executable, "-u", str(script)], check=True)
        if out.exists():
            raise Carried(out.read_text())


@program("FE076", "1", apart=True)
def a_loader_that_waits_too_long(well):
    wait = 0.0 if well else 2.5
    return list(DataLoader(Rows(lambda at: time.sleep(wait) or at), num_workers=1, timeout=30 if well else 1))


# -- ranks


class Half(torch.nn.Module):
    """Uses the second of its layers or not."""

    def __init__(self, both):
        super().__init__()
        self.first, self.second, self.both = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), both

    def forward(self, x):
        return self.second(self.first(x)) if self.both else self.first(x)


@program("FE080", "2", "3", apart=True)
def parameters_without_a_gradient(well):
    group()
    model = torch.nn.parallel.DistributedDataParallel(Half(both=well))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


@program("FE081", "first.", apart=True)
def a_parameter_that_is_ready_twice(well):
    from torch.utils.checkpoint import checkpoint

    class Twice(Half):
        def forward(self, x):
            x = checkpoint(self.first, x, use_reentrant=not well)
            return checkpoint(self.first, x, use_reentrant=not well)

    group()
    model = torch.nn.parallel.DistributedDataParallel(Twice(True), find_unused_parameters=True)
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()


@program("FE082", apart=True)
def a_port_in_use(well):
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = free_port() if well else other.getsockname()[1]
        dist.TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=3))


@program("FE083", "RANK", apart=True)
def a_rank_without_an_address(well):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    if well:
        group()
    else:
        dist.init_process_group("gloo")


@program("FE084", apart=True)
def nobody_answers(well):
    port = free_port()
    if well:
        dist.TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=3))
    else:
        dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=1))


@program("FE084", apart=True)
def a_rank_that_does_not_come(well):
    dist.TCPStore("127.0.0.1", free_port(), 1 if well else 2, True, timedelta(seconds=1))


def two_ranks(first: Callable[[], object], second: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Rank 0 is this process."""
    port = free_port()
    number = os.fork()
    if number == 0:
        group(1, 2, port, timeout_s)
        second()
        os._exit(0)
    try:
        group(0, 2, port, timeout_s)
        first()
    finally:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)


@program("FE088", apart=True)
def a_rank_that_is_gone(well):
    def sums():
        for _ in range(2):
            dist.all_reduce(torch.ones(2))

    two_ranks(sums, sums if well else lambda: dist.all_reduce(torch.ones(2)))


# -- checkpoints


@program("FE090", "module.")
def a_checkpoint_of_a_wrapped_model(well):
    model = Net()
    saved = {f"module.{name}": value for name, value in model.state_dict().items()}
    if well:
        saved = {name.removeprefix("module."): value for name, value in saved.items()}
    model.load_state_dict(saved)


@program("FE090", "fc2.weight")
def a_checkpoint_with_other_keys(well):
    saved = Net().state_dict()
    if not well:
        saved["fc2.weight"] = saved.pop("fc1.weight")
    Net().load_state_dict(saved)


@program("FE091", "fc1.weight", "10x128", "10x392")
def a_checkpoint_of_other_sizes(well):
    Net(392).load_state_dict(Net(392 if well else 128).state_dict())


class Settings:
    """An object that users put into checkpoints."""

    lr = 0.1


def saved(what):
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file


@program("FE093")
def half_a_checkpoint(well):
    data = saved(torch.zeros(100_000)).getvalue()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        path.write_bytes(data if well else data[: len(data) // 2])
        return torch.load(path)


@program("FE093")
def an_empty_checkpoint(well):
    return torch.load(saved([1]) if well else io.BytesIO(b""))


@program("FE096", apart=True)
def a_disk_that_is_full(well):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with tempfile.TemporaryDirectory() as folder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30 if well else 4096, resource.RLIM_INFINITY))
        try:
            torch.save(torch.ones(10_000), f"{folder}/model.pt")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# -- compiling


@program("FE100")
def recompiled_for_each_number(well):
    torch._dynamo.reset()

    @functools.partial(torch.compile, backend="eager", fullgraph=True, dynamic=well)
    def scale(x):
        return x * 2

    with torch._dynamo.config.patch(recompile_limit=2):
        for length in range(2, 6):
            scale(torch.ones(length))


@program(
    "FE102", apart=True, slow=True, tried="a compiler would compile for longer than the whole table takes"
)
def no_compiler(well):
    os.environ["PATH"] = ""
    os.environ.pop("CXX", None)
    os.environ.pop("CC", None)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

    @torch.compile
    def step(x):
        return x.sin() + 1

    return step(torch.ones(3))


# -- running them

_CARRIED = os.path.join(tempfile.gettempdir(), f"flatout-provoked-{os.getpid()}")


def raise_in_child(fails):
    try:
        fails()
    except Exception as error:
        seen, text = _seen(error)
        Path(_CARRIED).write_text(json.dumps([seen, text]))
    os._exit(1)


class Carried(Exception):
    """The record of a child of a program."""


def reraise_from_child():
    data = Path(_CARRIED).read_text()
    Path(_CARRIED).unlink()
    raise Carried(data)


def _seen(error):
    from flatout.agent.failure_details import record_failure

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's own would raise again for a second worker here
    trace = error.__traceback__
    # The frames of this file's own harness do not belong to the program.
    trace = trace.tb_next if trace is not None else None
    return record_failure(error.with_traceback(trace)).to_json(), "".join(
        traceback.format_exception(type(error), error, trace)
    )


def _die(one, well):
    try:
        one.run(well)
    except Carried as carried:
        seen, text = json.loads(str(carried))
        return {"live": seen, "text": text}
    except Exception as error:
        try:
            seen, text = _seen(error)
        except RuntimeError:  # it came before that
            seen, text = _seen(error)
        return {"live": seen, "text": text}
    return {}


def _apart(one, well):
    """Run it in a forked process. A process ended by a signal reports only the signal."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seen.json"
        number = os.fork()
        if number == 0:
            signal.alarm(60)
            try:
                out.write_text(json.dumps(_die(one, well)))
            except BaseException:
                out.write_text(json.dumps({"text": traceback.format_exc()}))
            os._exit(0)
        status = os.waitpid(number, 0)[1]
        if os.WIFSIGNALED(status):
            return {"signal": os.WTERMSIG(status), "text": ""}
        return json.loads(out.read_text())


def provoke(one):
    run = _apart if one.apart else _die
    ill = run(one, False)
    fixed = {} if one.tried else run(one, True)
    return {
        "name": one.name,
        "code": one.code,
        **ill,
        "fixed": fixed.get("text", "") if "signal" not in fixed else "killed",
        "tried": one.tried,
    }


def main():
    names = sys.argv[2:] or [name for name, one in PROGRAMS.items() if not one.slow]
    results = []
    for name in names:
        began = time.monotonic()
        results.append({**provoke(PROGRAMS[name]), "seconds": round(time.monotonic() - began, 2)})
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
