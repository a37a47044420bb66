"""Every reason that a lever gives: one program shows it because it is true there, another does not because it
would be untrue.

The programs are real processes (``programs/``), each started once. A reason without a row fails
``test_every_reason_has_a_row``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from processes import working_in
from reason_templates import FROM_THE_PIPELINE, templates
from trials import warm_programs

import flatout
from flatout.job.folder import JobFolder
from flatout.launch.command import parse_command
from flatout.launch.local_launcher import launcher_of
from flatout.levers import TABLE
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.enums import Effect
from flatout.schema.facts import Gpu
from flatout.schema.plan import Choice, Plan
from flatout.trial.parent import Trial
from flatout.tune import candidates, ranks

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="not run: the programs need Linux"),
    pytest.mark.processes,
]

HERE = Path(__file__).parent / "programs"
AT_ONCE = 2
ANSWER_S = 120.0
CXX = shutil.which("g++")
CHANGE_TORCH = (
    "OMP_",
    "MKL_",
    "MALLOC_",
    "MIMALLOC_",
    "PYTORCH_",
    "TORCH",
    "GLIBC_",
    "LD_PRELOAD",
    "FLATOUT_",
    "PYTEST_",
    "WORLD_SIZE",
    "RANK",
    "CXX",
)
BF16 = ("amx_bf16",)
A_GPU = (Gpu("H200", 2**37, (9, 0)),)
BY_ONE = {"batches": "cut", "reduction": "mean", "loaders": "0", "batchnorm": "all"}


@dataclass(frozen=True)
class Program:
    """``facts`` are assumptions about the machine in addition to its own facts; ``before`` and ``ranks`` say
    how the program is started.
    """

    script: str
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    ranks: int = 0
    plan: Plan = field(default_factory=Plan)
    gpu: bool = False


# {libm} is a library that is no allocator, in a folder with "malloc" in its name; {jemalloc} is the same file
# under the name of an allocator.
PROGRAMS = {
    "by_hand": Program(
        "by_hand",
        environment={"OMP_NUM_THREADS": "2", "MALLOC_ARENA_MAX": "1"},
        facts={"cpu_flags": ("avx2",)},
    ),
    "in_pieces": Program(
        "in_pieces",
        environment={"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "LD_PRELOAD": "{jemalloc}:{libm}"},
        facts={"gpus": A_GPU},
    ),
    "own_choices": Program("own_choices", facts={"gpus": A_GPU, "system": "Darwin"}),
    "switched_off": Program(
        "switched_off",
        environment={
            "PYTORCH_ALLOC_CONF": "",
            "LD_PRELOAD": "{libm}",
            "GLIBC_TUNABLES": "glibc.pthread.rseq=1",
            "MKL_NUM_THREADS": "2",
        },
    ),
    "second_order": Program("second_order", environment={"WORLD_SIZE": "2"}, facts={"allocators": {}}),
    "stream": Program("stream", environment={"PATH": "/nowhere"}, facts={"cpu_flags": ("avx2",)}),
    "own_sampler": Program("own_sampler", environment={"PATH": "/nowhere", "CXX": CXX or ""}),
    "ddp": Program(
        "ddp",
        environment={"TORCH_COMPILE_DISABLE": "1"},
        before=("torch.distributed.run", "--nproc-per-node", "2"),
    ),
    "half_precision": Program("half_precision", ranks=2, plan=Plan((Choice("data_parallel", BY_ONE),))),
    **{
        f"gpu_{word}": Program("on_a_gpu", (word,), gpu=True)
        for word in ("choices", "pieces", "products", "tensors")
    },
}


@dataclass(frozen=True)
class Row:
    """``lever`` gives ``sentence`` for the program ``shown``, and nothing like it for ``hidden``.

    ``not_run`` says why no program here can show it.
    """

    lever: str
    sentence: str
    shown: str = ""
    hidden: str = ""
    not_run: str = ""

    @property
    def on_a_gpu(self):
        return bool(self.shown) and PROGRAMS[self.shown].gpu


def each(levers, *rest):
    return [Row(lever, *rest) for lever in levers]


AMONG_RANKS = ("data_parallel", "sharding", "gradient_buckets")
OF_DDP = ("ddp_flags", "comm_compression")
NO_CUDA = "no parameter of the program is on a CUDA device"
NO_LOADER = "this process created no torch DataLoader, so its batches come from another source"
TWENTY = "the script calls 20 modules separately, and no module contains them all"
COMPILED = "the script compiles the model or a part of it, "
TWICE = "the script differentiates twice (create_graph=True), "
JIT = "the model or a part of it is compiled by torch.jit, "
NOT_CALLED = "no nn.Module with trainable parameters was called, as in `model(x)`"
ORDER = "the training DataLoader has a sampler ({}) that may depend on earlier steps, so batches cannot be loaded ahead"
OR_DDP = "this lever acts on a DistributedDataParallel, or on ranks that `flatout run --procs N` starts"
OF_TORCHRUN = "not run: tests/distributed/test_script_ddp.py asks such ranks of torchrun, and others"
ON_A_CARD = "not run: it needs a GPU; tests/rehearsal records modules on a stand-in for one"
OURS = "this lever acts only on ranks that `flatout run --procs N` starts"

ROWS = [
    # The machine and the environment.
    Row("allocator", "no CUDA device was found on this machine", "by_hand", "in_pieces"),
    Row(
        "allocator",
        "the environment sets PYTORCH_ALLOC_CONF already; unset it to measure this lever",
        "in_pieces",
        "switched_off",
    ),
    Row("allocator", NO_CUDA, "own_choices", "by_hand"),
    Row(
        "malloc",
        "this lever replaces allocators on Linux only, and this system is Darwin",
        "own_choices",
        "switched_off",
    ),
    Row(
        "malloc",
        "LD_PRELOAD names the allocator libjemalloc.so; remove it to measure allocators",
        "in_pieces",
        "switched_off",
    ),
    Row(
        "malloc",
        "the environment sets MALLOC_ARENA_MAX, which configures malloc; unset it to measure allocators",
        "by_hand",
        "switched_off",
    ),
    Row(
        "malloc",
        "no other allocator was found; install one with `pip install cmeel-mimalloc`",
        "second_order",
        "switched_off",
    ),
    Row(
        "malloc",
        "the parameters are on cuda, whose memory malloc does not manage",
        "gpu_choices",
        "switched_off",
    ),
    Row("threads", "the program has already set the number of threads to 3", "own_choices", "ddp"),
    Row(
        "threads",
        "the environment sets OMP_NUM_THREADS=2; unset it to measure this lever",
        "by_hand",
        "switched_off",
    ),
    Row(
        "threads",
        "torch already uses one thread in this process, and this lever only reduces threads",
        "ddp",
        "switched_off",
    ),
    Row(
        "threads",
        "the parameters are on cuda, where CPU threads do not compute",
        "gpu_choices",
        "switched_off",
    ),
    # Python and torch.
    Row("gc_pause", "the program has disabled automatic garbage collection", "own_choices", "switched_off"),
    Row("gc_pause", "the program has disabled automatic garbage collection", "second_order", "in_pieces"),
    Row(
        "gc_pause",
        "the program has already raised the first threshold of the garbage collector to 100000",
        "in_pieces",
        "switched_off",
    ),
    Row(
        "debug_off",
        "anomaly detection is off, and torch.distributions is not used",
        "by_hand",
        "switched_off",
    ),
    Row(
        "debug_off",
        "anomaly detection is off, and torch.distributions does not check arguments by default",
        "own_choices",
        "switched_off",
    ),
    # Loaders.
    Row("batch_size", NO_LOADER, "by_hand", "switched_off"),
    Row(
        "batch_size",
        "no backward pass followed a batch loaded with gradients enabled, so the training DataLoader is unknown",
        "second_order",
        "in_pieces",
    ),
    Row(
        "batch_size",
        "the training DataLoader does not make batches (batch_size=None); the data set or the script does",
        "stream",
        "in_pieces",
    ),
    Row(
        "batch_size",
        "the training DataLoader has a sampler (Backwards) of its own, which may depend on the batch size",
        "own_sampler",
        "switched_off",
    ),
    Row(
        "batch_size",
        "the training DataLoader has a batch sampler (Pairs) that sets the batch size",
        "in_pieces",
        "own_sampler",
    ),
    Row("loader", NO_LOADER, "by_hand", "switched_off"),
    Row(
        "loader",
        "the training data set is an IterableDataset; another number of workers could repeat or reorder its samples",
        "stream",
        "switched_off",
    ),
    Row("loader", ORDER.format("Backwards"), "own_sampler", "switched_off"),
    Row("loader", ORDER.format("Pairs"), "in_pieces", "second_order"),
    Row("device_prefetch", NO_CUDA, "switched_off", "gpu_choices"),
    Row("device_prefetch", NO_LOADER, "gpu_tensors", "gpu_products"),
    Row(
        "device_prefetch",
        "the training DataLoader no longer exists, so all its batches are already loaded",
        "gpu_products",
        "gpu_choices",
    ),
    *each(
        FROM_THE_PIPELINE[:2],
        "the script prepares its batches itself, without a DataLoader",
        "by_hand",
        "switched_off",
    ),
    *each(
        FROM_THE_PIPELINE[:2],
        "the DataLoader has batch_size=None, so the data set makes its batches itself",
        "stream",
        "own_sampler",
    ),
    Row(
        "batched_transforms",
        "the program has not imported torchvision's transforms",
        "switched_off",
        "by_hand",
    ),
    Row("resident_data", "the program does not train on a CUDA device", "by_hand", "gpu_choices"),
    Row(
        "resident_data",
        "the data needs 4096 MiB, and the limit is 2048 MiB on the GPU or 1024 MiB on the host",
        not_run="not run: it needs a data set larger than a quarter of a GPU's memory, and of the host's",
    ),
    # Several ranks.
    *each(
        (*AMONG_RANKS, "comm_compression"),
        "flatout started the program as one process; `flatout run --procs N` starts it as N ranks",
        "by_hand",
        "ddp",
    ),
    *each(
        AMONG_RANKS,
        f"the program created its own torch.distributed process group, and {OURS}",
        "ddp",
        "second_order",
    ),
    *each(
        AMONG_RANKS,
        f"another launcher started this process (WORLD_SIZE=2), and {OURS}",
        "second_order",
        "switched_off",
    ),
    Row(
        "comm_compression",
        f"the program created its own torch.distributed process group, and {OR_DDP}",
        "own_choices",
        "second_order",
    ),
    Row(
        "comm_compression",
        f"another launcher started this process (WORLD_SIZE=2), and {OR_DDP}",
        "second_order",
        "switched_off",
    ),
    Row("ddp_flags", "the program trains no torch.nn.parallel.DistributedDataParallel", "own_choices", "ddp"),
    Row(
        "ddp_flags",
        "the script already sets gradient_as_bucket_view",
        not_run=OF_TORCHRUN,
    ),
    *(
        Row(
            lever,
            "the program's DistributedDataParallel has one rank, so nothing is exchanged",
            not_run=OF_TORCHRUN,
        )
        for lever in OF_DDP
    ),
    Row(
        "comm_compression",
        "the script has registered its own communication hook, which stays",
        not_run=OF_TORCHRUN,
    ),
    Row(
        "sharding",
        "this torch was built without torch.distributed",
        not_run="not run: it needs a torch without torch.distributed",
    ),
    Row(
        "comm_compression",
        "no gradient is float32 or float64, and this lever compresses only those",
        "half_precision",
        "ddp",
    ),
    Row(
        "gradient_buckets",
        "all bucket sizes that this lever tries give the same buckets",
        "half_precision",
        "ddp",
    ),
    Row(
        "gradient_buckets",
        "no forward pass has used a parameter with requires_grad yet",
        not_run="not run: a warm program of ranks has trained something",
    ),
    # Precision.
    *each(
        ("tf32", "cudnn_benchmark", "early_values", "graphs"),
        NO_CUDA,
        "switched_off",
        "gpu_choices",
    ),
    Row(
        "early_values",
        "the program uses the allocator cudaMallocAsync, which does not say on which stream a value was computed",
        not_run="not run: it needs a GPU with PYTORCH_ALLOC_CONF=backend:cudaMallocAsync",
    ),
    Row(
        "tf32",
        "this GPU has no TF32, which needs compute capability 8.0 or higher",
        not_run="not run: it needs a GPU of compute capability below 8.0",
    ),
    Row(
        "tf32",
        "deterministic algorithms are enabled, so the precision does not change",
        "gpu_pieces",
        "gpu_products",
    ),
    Row(
        "tf32",
        "the float32 precision of matrix products is already set to ieee",
        "gpu_choices",
        "gpu_products",
    ),
    Row(
        "cudnn_benchmark",
        "no CUDA device was found on this machine",
        "by_hand",
        "gpu_choices",
        not_run="not run: it is said before the first step alone, which test_cudnn_benchmark.py sees",
    ),
    Row(
        "cudnn_benchmark",
        "deterministic algorithms are enabled, and this lever would choose other algorithms",
        "gpu_pieces",
        "gpu_choices",
    ),
    Row("cudnn_benchmark", "torch.backends.cudnn.benchmark is already True", "gpu_choices", "gpu_pieces"),
    Row("cudnn_benchmark", "no module of the model is an nn.Conv layer", "gpu_products", "gpu_choices"),
    Row(
        "reduced_precision",
        "the parameters are on cuda, and this lever acts on the CPU",
        "gpu_choices",
        "switched_off",
    ),
    Row(
        "reduced_precision",
        "this processor has neither AMX-BF16 nor AVX512-BF16 instructions",
        "by_hand",
        "switched_off",
    ),
    Row(
        "reduced_precision",
        "this PyTorch was built without oneDNN",
        not_run="not run: it needs a torch without oneDNN",
    ),
    Row(
        "reduced_precision",
        "the program has already set the float32 precision of oneDNN to ieee",
        "own_choices",
        "switched_off",
    ),
    Row("autocast", "the program already trains under autocast", "own_choices", "switched_off"),
    Row("autocast", TWENTY, "in_pieces", "switched_off"),
    Row(
        "autocast",
        "the program trains parameters that are not float32 (torch.complex64, torch.float64)",
        "own_sampler",
        "switched_off",
    ),
    Row(
        "autocast",
        "the program trains parameters that are not float32 (torch.bfloat16)",
        "half_precision",
        "ddp",
    ),
    Row(
        "autocast",
        "the program already scales its losses with a GradScaler",
        not_run="not run: it needs a GPU of compute capability below 8.0",
    ),
    Row(
        "autocast",
        "this processor has no bfloat16 instructions (AMX, AVX512-BF16 or those of ARM), and bfloat16 is slower without them",
        "by_hand",
        "switched_off",
    ),
    Row(
        "autocast",
        "the parameters are on mps, where flatout has not measured autocast",
        not_run="not run: it needs a device that is neither a CPU nor CUDA",
    ),
    # The model.
    Row("channels_last", "no module of the model is an nn.Conv2d or nn.ConvTranspose2d", "by_hand", "stream"),
    Row("channels_last", TWENTY, "in_pieces", "switched_off"),
    Row(
        "channels_last",
        "LBFGS flattens the gradients, which requires their default layout",
        "second_order",
        "switched_off",
    ),
    Row(
        "channels_last",
        "1 of 2 convolution weights are already stored as channels_last",
        "own_choices",
        "switched_off",
    ),
    Row(
        "attention", f"{COMPILED}and the compiler recognises attention itself", "own_choices", "switched_off"
    ),
    Row("attention", f"{TWICE}and fused attention has no second derivative", "second_order", "switched_off"),
    Row(
        "attention",
        "no module of the model multiplies matrices and takes a softmax in its forward",
        "switched_off",
        "own_sampler",
    ),
    Row(
        "attention",
        "the program calls scaled_dot_product_attention itself, and FlashAttention 3 and 4 need a GPU",
        not_run="not run: no program here calls it by name; test_attention_lever.py sees it",
    ),
    Row(
        "graphs",
        "torch.compile records GPT as CUDA graphs itself",
        not_run="not run: it needs the lever compile beside it, as in test_compile.py",
    ),
    *each(
        ("compile", "memory_budget"),
        "torch.compile is switched off in this process (TORCH_COMPILE_DISABLE=1)",
        "ddp",
        "switched_off",
    ),
    Row("compile", COMPILED.removesuffix(", "), "own_choices", "switched_off"),
    Row("memory_budget", f"{COMPILED}before a budget could be set", "own_choices", "switched_off"),
    *each(
        ("compile", "memory_budget"),
        f"{TWICE}and compiled functions have no second derivative",
        "second_order",
        "switched_off",
    ),
    *each(("compile", "recompute"), TWENTY, "in_pieces", "switched_off"),
    *each(("compile", "memory_budget", "recompute"), NOT_CALLED, "by_hand", "stream"),
    Row(
        "compile",
        "compiling for the CPU needs a C++ compiler, and g++ was not found; install it (`apt-get install g++`) or set CXX to another one",
        "stream",
        "own_sampler",
    ),
    Row(
        "compile",
        "compiling for a GPU needs Triton, which is not installed; run `pip install triton`",
        not_run="not run: it needs a GPU without Triton",
    ),
    Row(
        "compile",
        "Triton needs a C compiler on the host, and gcc was not found; install it (`apt-get install gcc`) or set CC to another one",
        not_run="not run: it needs a GPU without a compiler",
    ),
    Row("fused_ops", f"{COMPILED}and the compiler fuses operations itself", "own_choices", "switched_off"),
    Row("fused_ops", f"{TWICE}and these kernels have no second derivative", "second_order", "switched_off"),
    Row(
        "fused_ops",
        "the program has no torch.optim.Optimizer to show when the weights change; logits that are read late need the old weights",
        "in_pieces",
        "switched_off",
    ),
    Row(
        "fused_ops",
        "the vocabulary-sized Linear layer is not a plain nn.Linear (custom class, hooks, forward or parameters)",
        "stream",
        "switched_off",
    ),
    Row(
        "fused_ops",
        "no linear layer has at least 8192 outputs, or as many as an Embedding has rows, and no layer on a CUDA device is a LayerNorm "
        "with weights",
        "ddp",
        "stream",
    ),
    Row("inplace", f"{COMPILED}and the compiler places results itself", "own_choices", "switched_off"),
    Row("inplace", f"{JIT}which does not read the inplace attribute of its layers", "stream", "in_pieces"),
    Row(
        "inplace",
        "the model has no nn.ReLU, nn.ReLU6, nn.Hardtanh or nn.LeakyReLU layer without inplace=True",
        "second_order",
        "switched_off",
    ),
    Row("recompute", f"{COMPILED}and the compiler chooses what is kept", "own_choices", "switched_off"),
    Row(
        "recompute",
        "there is no block to recompute: the model has no two blocks of the same class with at least two layers each",
        "switched_off",
        "own_choices",
    ),
    Row("recompute", f"{TWICE}which recomputed activations do not support", "second_order", "switched_off"),
    Row("recompute", f"{JIT}which does not call the forward of its layers", "stream", "switched_off"),
    Row("graphs", TWENTY, "gpu_pieces", "gpu_choices"),
    *(
        Row("graphs", sentence, not_run=ON_A_CARD)
        for sentence in (
            f"{TWICE}and a recorded backward pass has no second derivative",
            "the program has several ranks, and a recorded backward pass could not send gradients while it computes",
            NOT_CALLED,
            "DataParallel cannot be recorded",
            "parameters and buffers of Net are not all on one CUDA device",
            "the script has hooks on Linear, which a recording would not call",
        )
    ),
    # Optimizers.
    Row(
        "fused_optimizer",
        "the program updates its parameters without a torch.optim.Optimizer",
        "in_pieces",
        "stream",
    ),
    Row("fused_optimizer", "the program creates its Adam with fused=True", "own_choices", "switched_off"),
    Row(
        "fused_optimizer",
        "Adam updates complex or sparse parameters, which no fused kernel supports",
        "own_sampler",
        "switched_off",
    ),
    Row(
        "fused_optimizer", "LBFGS has no fused or multi-tensor implementation", "second_order", "own_choices"
    ),
]


# -- the programs


@contextlib.contextmanager
def surroundings(program, folder):
    """Nothing in the present environment may change the answers of a program."""
    libraries = {
        name: str(folder / "malloc" / file)
        for name, file in (("libm", "libm.so.6"), ("jemalloc", "libjemalloc.so"))
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CHANGE_TORCH)}
    kept["PYTHONPATH"] = str(Path(flatout.__file__).parents[1])  # the programs use the flatout that is tested
    with mock.patch.dict(
        os.environ,
        {**kept, **{name: value.format(**libraries) for name, value in program.environment.items()}},
        clear=True,
    ):
        yield


def begin(name, folder):
    program = PROGRAMS[name]
    script = (str(HERE / f"{program.script}.py"), *program.words)
    command = parse_command((sys.executable, *(("-m", *program.before) if program.before else ()), *script))
    if program.ranks:
        command = launcher_of(command, program.ranks, cores=program.ranks)
    with surroundings(program, folder):
        facts = look() if program.gpu else replace(look(), **{"cpu_flags": BF16, "gpus": (), **program.facts})
        return Trial(command, JobFolder(folder / name).make().new_trial(), program.plan, facts).start()


def has_gpu():
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def answers(chosen, tmp_path_factory):
    """Program -> lever -> its answer, for the programs that the chosen tests need.

    Two start at a time: a start is mostly one thread that imports.
    """
    folder = tmp_path_factory.mktemp("reasons")
    (folder / "malloc").mkdir()
    libm = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libm.so" in line or "libm-" in line
    )
    for name in ("libm.so.6", "libjemalloc.so"):
        (folder / "malloc" / name).symlink_to(libm)
    rows = chosen("row")
    names = {name for row in rows for name in (row.shown, row.hidden)} | {"switched_off"}
    waiting, running, found = (
        deque(name for name in PROGRAMS if name in names and (has_gpu() or not PROGRAMS[name].gpu)),
        deque[tuple[str, Trial]](),
        {},
    )
    with working_in(folder), warm_programs(), contextlib.ExitStack() as trials:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name = waiting.popleft()
                trial = begin(name, folder)
                trials.callback(trial.close)
                running.append((name, trial))
            name, trial = running.popleft()
            trial.wait_ready(seconds() + ANSWER_S)
            found[name] = trial.ask({"do": "options"}, seconds() + ANSWER_S)["options"]
            trial.close()
    return found


def marked(row):
    marks = (
        [pytest.mark.gpu] if row.on_a_gpu else [pytest.mark.skip(reason=row.not_run)] if row.not_run else []
    )
    return pytest.param(row, marks=marks, id=f"{row.lever}: {row.sentence[:60]}")


@pytest.mark.parametrize("row", [marked(row) for row in ROWS])
def test_a_reason_is_shown_where_it_is_true(answers, row):
    assert answers[row.shown][row.lever].get("skip") == row.sentence


def not_shown(row):
    """The other program may need a GPU where the first needs none."""
    param = marked(row)
    return (
        param
        if param.marks or not PROGRAMS[row.hidden].gpu
        else pytest.param(row, marks=pytest.mark.gpu, id=param.id)
    )


@pytest.mark.parametrize("row", [not_shown(row) for row in ROWS])
def test_a_reason_is_not_shown_where_it_is_untrue(answers, row):
    """Nor may the same sentence appear with another name or number."""
    said = answers[row.hidden][row.lever].get("skip", "")
    assert not [
        template
        for template in templates(row.lever)
        if re.fullmatch(template, row.sentence) and re.fullmatch(template, said)
    ]


# -- the source


def readable(template):
    """The sentence of a template, with ... for its placeholders."""
    return re.sub(r"\\(.)|\.\+", lambda part: part[1] or "...", template)


@pytest.mark.parametrize("lever", [lever.name for lever in TABLE])
def test_every_reason_has_a_row(lever):
    """A new reason needs one program for which it is true, and one for which it is not."""
    rows = [row for row in ROWS if row.lever == lever]
    without = [
        f'add a Row("{lever}", "{readable(template)}", shown, hidden) to ROWS: shown is a program for which this '
        'is true, hidden one for which it is not; or not_run="not run: ..." if no program here can show it'
        for template in templates(lever)
        if not any(re.fullmatch(template, row.sentence) for row in rows)
    ]
    assert not without, "\n".join(without)
    stale = [
        row.sentence
        for row in rows
        if not any(re.fullmatch(template, row.sentence) for template in templates(lever))
    ]
    assert stale == [] or lever in FROM_THE_PIPELINE
    assert rows, f"{lever} has no Row in ROWS"
    assert all(
        (row.shown in PROGRAMS and row.hidden in PROGRAMS and row.shown != row.hidden)
        or row.not_run.startswith("not run: ")
        for row in rows
    )


# -- reasons of the search


def considered(options, **given):
    """Lever -> the reason that the search gives for a lever that the program allows."""
    found = candidates.make_candidates(options, frozenset(Effect), None, **given)
    return {name: candidate.reason for name, candidate in found.items() if "skip" not in options[name]}


def test_a_memory_lever_is_left_out_only_where_memory_is_not_limited(answers):
    options = answers["switched_off"]
    plain, limited = considered(options), considered(options, memory_limited=True)
    saving = {lever.name for lever in TABLE if lever.saves_memory} & plain.keys()
    assert {"inplace", "memory_budget"} <= saving
    assert {name for name, reason in plain.items() if reason == candidates.MEMORY_ONLY} == saving
    assert candidates.MEMORY_ONLY not in limited.values()


@pytest.mark.parametrize(
    ("name", "shards", "reason"),
    [
        ("loader", False, ranks.LOADERS_SPLIT),
        ("compile", False, ranks.SINGLE_PROCESS_ONLY),
        ("fused_optimizer", False, None),
        ("channels_last", False, None),
        ("gc_pause", False, None),
        ("channels_last", True, ranks.NEEDS_WHOLE_WEIGHTS),
        ("fused_optimizer", True, ranks.NEEDS_WHOLE_WEIGHTS),
        ("fused_ops", True, ranks.NEEDS_WHOLE_WEIGHTS),
        ("autocast", True, None),
        ("reduced_precision", True, None),
        ("gc_pause", True, None),
    ],
)
def test_a_lever_is_left_out_of_several_ranks_for_a_reason_of_its_own(answers, name, shards, reason):
    """A lever without batches gives no reason about loaders; a lever that leaves weights alone gives none
    about whole weights.
    """
    said = considered(
        answers["switched_off"], base=ranks.base_plan(BY_ONE, shards), why_incompatible=ranks.why_incompatible
    )[name]
    assert (
        said == reason
        if reason
        else said not in (ranks.LOADERS_SPLIT, ranks.SINGLE_PROCESS_ONLY, ranks.NEEDS_WHOLE_WEIGHTS)
    )
