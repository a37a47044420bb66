"""Reads the settings of torch and the program, for the rules that find wrong settings."""

from __future__ import annotations

import gc
import os
from collections import Counter
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from flatout.schema.program import TrainingContext

OF_AN_OPTIMIZER = (
    "lr",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "momentum",
    "weight_decay",
)


def settings(torch: ModuleType, context: TrainingContext) -> dict[str, Any]:
    """Return the settings as JSON, without those that this version of torch does not report."""
    modules = [module for root in context.roots for module in root.modules()]
    found: dict[str, Any] = {
        "anomaly": bool(torch.is_anomaly_enabled()),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "gc": gc.isenabled(),
        "autocast": bool(context.autocast_seen),
        "scalers": len(context.scalers),
        "compiled": bool(context.compiled_by_script),
        "optimizers": [_optimizer(optimizer) for optimizer in context.optimizers],
        "modules": dict(Counter(type(module).__name__ for module in modules)),
        "training": {
            "train": sum(module.training for module in modules),
            "eval": sum(not module.training for module in modules),
        },
        "dtypes": {},
        "devices": sorted({str(p.device) for p in context.parameters}),
        "gradient_bytes": _gradients(context),
    }
    for parameter in context.parameters:
        name = str(parameter.dtype).removeprefix("torch.")
        found["dtypes"][name] = found["dtypes"].get(name, 0) + parameter.numel() * parameter.element_size()
    with suppress(RuntimeError):  # set in both ways
        found["matmul_precision"] = torch.get_float32_matmul_precision()
    return found


def _gradients(context: TrainingContext) -> list[int]:
    """Bytes of each gradient, in the order expected of the backward pass: modules in reverse."""
    known = {id(p): p for root in context.roots for p in root.parameters() if p.requires_grad}
    known.update({id(p): p for p in context.parameters if id(p) not in known})
    return [p.numel() * p.element_size() for p in reversed(known.values())]


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    info = {
        name: group[name]
        for name in OF_AN_OPTIMIZER
        if isinstance(group.get(name), (bool, int, float, type(None))) and name in group
    }
    tensors = [p for each in optimizer.param_groups for p in each["params"]]
    return {
        "kind": type(optimizer).__name__,
        "module": type(optimizer).__module__,
        "groups": len(optimizer.param_groups),
        "tensors": len(tensors),
        "parameters": sum(p.numel() for p in tensors),
        **info,
    }
