"""A profile of a healthy program, and the changes that make it faulty: one for each measured rule."""

import copy
from dataclasses import replace

from flatout.schema.findings import SourceLocation
from flatout.schema.profile import (
    IdleGap,
    LoaderRecord,
    MemoryGrowth,
    MemoryProfile,
    MemorySample,
    Operation,
    ProfileRecord,
    SyncRecord,
    WhatIf,
)
from flatout.schema.records import PhaseTime, Ratio
from flatout.schema.run_request import CompileRecord

LOOP = SourceLocation("train.py", 40, 0, "main", "for images, labels in loader:")
LOADER = SourceLocation("train.py", 30, 0, "main", "loader = DataLoader(data)")
FETCH = SourceLocation("train.py", 12, 0, "__getitem__", "image = decode(self.files[i])")
LINE = SourceLocation("train.py", 47, 0, "main", "print(loss)")
NO_GAIN, GAIN = Ratio(1.01, 0.97, 1.04, 20), Ratio(1.8, 1.6, 2.0, 20)
PARTS = {
    "parameters": 40,
    "gradients": 40,
    "optimizer state": 80,
    "activations": 200,
    "inputs": 10,
    "buffers": 2,
    "other": 3,
    "fragmentation": 5,
}


def healthy(**changes):
    """A step of 10 ms with everything measured and nothing found."""
    times = [10.0 + 0.1 * (i % 7) for i in range(60)]
    phases = {
        "data": PhaseTime(0.2, 0.1, 0.3, 0.02),
        "forward": PhaseTime(3.5, 3.3, 3.7, 0.35),
        "backward": PhaseTime(5.5, 5.2, 5.8, 0.55),
        "optimizer": PhaseTime(0.5, 0.4, 0.6, 0.05),
        "other": PhaseTime(0.3, 0.2, 0.4, 0.03),
    }
    what_ifs = [
        WhatIf("loader", NO_GAIN, 9.9),
        WhatIf("copies", why_not="there is no device to copy to"),
        WhatIf("optimizer", Ratio(1.06, 1.04, 1.08, 20), 9.5),
        WhatIf("syncs", NO_GAIN, 9.9),
        WhatIf("logging", NO_GAIN, 9.9),
        WhatIf("gc", NO_GAIN, 9.9),
        WhatIf("one thread fewer", Ratio(0.7, 0.6, 0.8, 20), 14.0),
    ]
    single = ["float32"]
    operations = [
        Operation("aten::addmm", 6, 3.0, None, 0.4, 2e8, 4e6, single, ["[128, 512]"], 0.6, "compute"),
        Operation("aten::relu", 4, 0.4, None, 0.05, 4e5, 1e6, single, roofline=0.8, limit="memory"),
        Operation("aten::copy_", 4, 0.2, None, 0.03, None, 1e6, single, roofline=0.5, limit="memory"),
    ]
    timeline = [
        MemorySample(
            float(ms),
            {
                kind: round(amount * 2**20 * (0.3 + ms / 14 if kind == "activations" else 1))
                for kind, amount in PARTS.items()
            },
        )
        for ms in range(11)
    ]
    memory = MemoryProfile(
        "host",
        380 * 2**20,
        {kind: amount * 2**20 for kind, amount in PARTS.items()},
        {"features.0": 120 * 2**20, "head": 80 * 2**20},
        SourceLocation("train.py", 44, 0, "main", "loss = criterion(model(x), y)"),
        timeline,
    )
    settings = {
        "anomaly": False,
        "threads": 2,
        "cores": 2,
        "optimizers": [{"kind": "AdamW", "tensors": 12, "fused": True}],
        "modules": {"Linear": 3, "Dropout": 1},
        "training": {"train": 5, "eval": 0},
        "dtypes": {"float32": 4000},
    }
    record = ProfileRecord(
        ["python", "train.py"],
        "/job",
        flatout="0",
        created="2026-11-21T12:00:00Z",
        status="done",
        machine={"cpu": "a CPU", "cores": 2, "memory_bytes": 2**34},
        steps=60,
        warmup_steps=4,
        warmup_ms=120.0,
        first_step_ms=60.0,
        step_ms=10.3,
        step_ms_list=times,
        samples_per_s=12000.0,
        phases=phases,
        bound="compute",
        bound_why="two thirds of the step are matrix products",
        overhead=Ratio(1.02, 0.99, 1.05, 12),
        what_ifs=what_ifs,
        operations=operations,
        operators_a_step=160,
        operator_us=50.0,
        flops_a_step=3e8,
        mfu=0.3,
        memory=memory,
        settings=settings,
        python_ms=1.0,
        loaders=[
            LoaderRecord(
                LOADER,
                1,
                3,
                0,
                batch_size=128,
                dataset="TensorDataset",
                wait_ms=0.2,
                start_ms=0.5,
                fetch_ms=0.2,
                batches=64,
            )
        ],
        tensor_growth=MemoryGrowth(0.0, 0.8, False, series=[float(100 + i % 2) for i in range(12)]),
        host_growth=MemoryGrowth(0.0, 0.9, False),
        ceilings={"matmul_float32_flops": 8e10, "memory_bytes_per_s": 1e10},
    )
    for name, value in changes.items():
        record.__dict__[name] = value
    return copy.deepcopy(record)  # other records share its parts, and a test may change its own


def what_ifs(**gains):
    """The what-ifs of the healthy program, with these replaced; ``one_thread_more`` is "one thread more"."""
    named = {name.replace("_", " "): ratio for name, ratio in gains.items()}
    old = [w for w in healthy().what_ifs if w.name not in named]
    return [*old, *(WhatIf(name, ratio, 10.3 / ratio.median) for name, ratio in named.items())]


def settings(**changes):
    return {**healthy().settings, **changes}


def loader(**changes):
    return [replace(healthy().loaders[0], **changes)]


def event(ms=0.0, calls=1.0, place=LINE, most=1):
    return {"calls": calls, "ms": ms, "most": most, "places": [place.to_json()]}


def waits(**changes):
    """A loader for which the program waits."""
    return {"what_ifs": what_ifs(loader=GAIN), "loaders": loader(wait_ms=4.0, **changes)}


def one(name, *numbers, **more):
    """One operator that does it all."""
    return {"operations": [Operation(f"aten::{name}", *numbers, **more)]}


GPU = {"device": "cuda", "machine": {"gpus": [{"name": "a GPU", "memory_bytes": 2**30}]}}
SLOW_LIST = [10.0 + 0.2 * i for i in range(60)]

# rule -> the changes to the healthy profile, and the line that must be named
ILL = {
    "data_wait": (waits(), LOADER),
    "slow_fetch": (waits(fetch_ms=4.0, slow_place=FETCH, slow_share=0.9), FETCH),
    "loader_made_in_loop": (waits(created=8, iterators=8, workers=2), LOADER),
    "workers_not_kept": (waits(iterators=8, workers=2, start_ms=30.0), LOADER),
    "too_many_workers": (waits(workers=16, persistent_workers=True), LOADER),
    "optimizer_share": (
        {
            "what_ifs": what_ifs(optimizer=GAIN),
            "settings": settings(optimizers=[{"kind": "AdamW", "tensors": 192, "foreach": False}]),
            "phases": {**healthy().phases, "optimizer": PhaseTime(4.6, 4.4, 4.8, 0.45)},
            "events": {"make_optimizer": event(calls=0.01)},
        },
        LINE,
    ),
    "host_sync_every_step": (
        {"what_ifs": what_ifs(syncs=GAIN), "synchronisations": [SyncRecord("item", LINE, 2.0, 4.0)]},
        LINE,
    ),
    "tiny_operators": (
        {
            "bound": "python",
            "operators_a_step": 4000.0,
            "operator_us": 6.0,
            "step_ms": 40.0,
            "python_ms": 8.0,
            "operations": [Operation("aten::add", 900, 4.0, place=LINE)],
        },
        LINE,
    ),
    "collecting_garbage": ({"what_ifs": what_ifs(gc=GAIN), "gc_ms": 4.0, "gc_longest_ms": 5.0}, None),
    "gc_collect_every_step": (
        {"what_ifs": what_ifs(gc=GAIN), "gc_ms": 4.0, "events": {"gc_collect": event(4.0)}},
        LINE,
    ),
    "recompiles": ({"compile_record": CompileRecord(9, 8, 0, ["size 12 against 13"], [LINE], 4000.0)}, LINE),
    "graph_breaks": ({"compile_record": CompileRecord(4, 0, 3, ["Tensor.item()"], [LINE], 400.0)}, LINE),
    "slow_attention": (
        {"events": {"slow_attention": {**event(), "note": "[1, 2]; because of dropout"}}},
        LINE,
    ),
    "slow_convolution": (
        one("_slow_conv2d_forward", 6, 6.0, share=0.8, dtypes=["float32"], place=LINE),
        LINE,
    ),
    "transposed_logits": (
        {
            **one("copy_", 6, 1.0, share=0.1),
            "events": {"transposed_logits": {**event(), "note": "[1, 2, 3]"}},
        },
        LINE,
    ),
    "padding": ({"events": {"padding": {**event(), "note": "0.400"}}}, LINE),
    "double_precision": (
        one("addmm", 6, 6.0, share=0.8, dtypes=["float64"], place=LINE),
        LINE,
    ),
    "thread_count": (
        {
            "what_ifs": what_ifs(one_thread_more=GAIN),
            "settings": settings(threads=1),
            "events": {"set_threads": event(calls=0.01)},
        },
        LINE,
    ),
    "slow_copies": (
        {
            **GPU,
            "what_ifs": what_ifs(copies=GAIN),
            "synchronisations": [SyncRecord("to device", LINE, 2.0, 4.0, 2**22, False, False)],
        },
        LINE,
    ),
    "logging_cost": ({"what_ifs": what_ifs(logging=GAIN), "events": {"save": event(4.0)}}, LINE),
    "tensor_cores_idle": (
        {
            **GPU,
            "operations": [
                Operation("aten::addmm", 6, 1.0, 5.0, 0.7, dtypes=["float32"], tensor_cores=False, place=LINE)
            ],
        },
        LINE,
    ),
    "launch_bound": (
        {**GPU, "bound": "launch", "idle_ms": 5.0, "idle_gaps": [IdleGap("aten::add", 3.0, 40.0, LINE)]},
        LINE,
    ),
    "python_between": ({"events": {"between": event(3.0)}}, LINE),
    "debugging_left_on": (
        {"settings": settings(anomaly=True), "events": {"anomaly": event(calls=0.01)}},
        LINE,
    ),
    "data_parallel_used": ({"events": {"data_parallel": event(calls=1.0)}}, LINE),
    "slowing_down": (
        {"step_ms_list": SLOW_LIST, "tensor_growth": MemoryGrowth(1e5, 1e-6, True, "list `answers`", LINE)},
        LINE,
    ),
    "layout_copies": (
        {
            "operations": [
                Operation("aten::copy_", 12, 3.0, share=0.4, dtypes=["float32"], place=LINE),
                Operation("aten::clone", 12, 0.1, share=0.01, dtypes=["float32"], place=LINE),
            ]
        },
        LINE,
    ),
    "eval_without_no_grad": ({"events": {"eval_with_grad": event(calls=0.4)}}, LINE),
    "train_mode_not_restored": (
        {
            "settings": settings(training={"train": 0, "eval": 6}),
            "events": {"forward": event(), "eval_with_grad": event()},
        },
        LINE,
    ),
    "optimizer_made_every_step": ({"events": {"make_optimizer": event(most=3)}}, LINE),
    "scheduler_remade": ({"events": {"make_scheduler": event(most=3)}}, LINE),
    "gradients_zeroed": ({"events": {"zero_grad_to_zero": event(0.1)}}, LINE),
    "not_finite": ({"events": {"loss_not_finite": event(calls=0.5)}}, LINE),
    "loss_kept_with_graph": (
        {"tensor_growth": MemoryGrowth(1e5, 1e-6, True, "list `losses`", LINE, graph=True)},
        LINE,
    ),
    "leak": ({"tensor_growth": MemoryGrowth(1e5, 1e-6, True, "list `outputs`", LINE)}, LINE),
    "host_growth": ({"host_growth": MemoryGrowth(2e6, 1e-6, True, "list `given`", LINE)}, LINE),
    "empty_cache_every_step": ({"events": {"empty_cache": event(0.02)}}, LINE),
    "fragmentation": (
        {
            **GPU,
            "memory": MemoryProfile(
                "device", 2**28, dict(PARTS), peak_place=LINE, reserved_bytes=2**29, retries=3
            ),
        },
        LINE,
    ),
    "memory_limit": (
        {
            **GPU,
            "memory": MemoryProfile("device", 2**30 - 2**24, {"activations": 2**29}, {"head": 2**28}, LINE),
        },
        LINE,
    ),
    "tiny_batch_norm": (
        {
            "operations": [Operation("aten::native_batch_norm", 1, 0.1, shapes=["(2, 512) x (512,)"])],
            "settings": settings(modules={"BatchNorm1d": 1}),
            "events": {"forward": event()},
        },
        LINE,
    ),
}
