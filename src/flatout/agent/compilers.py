"""Reports what torch.compile does in this process: which modules it compiles, at what cost, and whether it is disabled."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from flatout.agent.frames import is_user_file, place_at
from flatout.schema.run_request import CompileRecord

if TYPE_CHECKING:
    from torch.nn import Module

DISABLING_VARIABLES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
COMPILED_MARK = (
    "_torchdynamo_orig_callable"  # attribute of every callable from torch.compile, unless disable=True
)

# Temporary hooks with which flatout finds root modules; not caused by the program
OWN_HOOK = "._global_forward_"
MAX_REASONS = 12


def compiler_off() -> str:
    """Return the setting that disables torch.compile here, as a user would write it; empty if enabled."""
    for name in DISABLING_VARIABLES:
        if os.environ.get(name) == "1":
            return f"{name}=1"
    # Importing these takes seconds; if they are not imported, their settings are unchanged.
    stance = getattr(getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None), "stance", "")
    if stance == "force_eager":
        return 'torch.compiler.set_stance("force_eager")'
    return (
        "torch._dynamo.config.disable = True"
        if getattr(sys.modules.get("torch._dynamo.config"), "disable", False)
        else ""
    )


def is_compiled(module: Module) -> bool:
    """Whether torch.compile, being enabled, compiles this module or one inside it."""
    return any(map(_has_compiled_code, module.modules())) and not compiler_off()


def _has_compiled_code(module: Module) -> bool:
    if type(module).__name__ == "OptimizedModule":  # torch.compile(module)
        return True
    # module.compile(), and module.forward = torch.compile(module.forward)
    return any(
        hasattr(code, COMPILED_MARK)
        for code in (getattr(module, "_compiled_call_impl", None), vars(module).get("forward"))
    )


def compile_record() -> CompileRecord | None:
    """What torch.compile did, from torch's counters; None if nothing was compiled. Loads nothing."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None or not dynamo.counters["frames"].get("total"):
        return None
    breaks, cache = dynamo.counters["graph_break"], dynamo.counters["inductor"]
    record = CompileRecord(
        graphs=dynamo.counters["stats"]["unique_graphs"],
        breaks=sum(breaks.values()),
        cached=cache["fxgraph_cache_hit"],
        uncached=cache["fxgraph_cache_miss"] + cache["fxgraph_cache_bypass"],
    )
    reasons: list[tuple[str, list[tuple[str, int]]]]
    reasons = [  # private to torch: another release may lack them
        (seen.reason, [(frame.filename, frame.lineno) for frame in reversed(seen.user_stack)])
        for seen in getattr(dynamo, "graph_break_reasons", ())
    ]
    reasons += [(reason, []) for reason in breaks.keys() - {reason for reason, _ in reasons}]
    for metrics in map(vars, list(getattr(dynamo, "_compilation_metrics", ()))):
        record.ms += (metrics.get("duration_us") or 0) / 1000
        record.saved_ms += (metrics.get("distributed_ephemeral_timeout_us") or 0) / 1000
        reason = metrics.get("recompile_reason")
        if reason and OWN_HOOK not in reason:
            record.recompiles += 1
            line = metrics.get("co_filename") or "", metrics.get("co_firstlineno") or 0
            reasons.append((f"recompiled: {reason}", [line]))
    for reason, lines in reasons:
        place = next((place_at(*line) for line in lines if is_user_file(line[0])), None)
        text = " ".join(reason.strip().split("\n")[0].partition("  # ")[0].split())[:240]
        if place is not None:
            text += f" ({os.path.basename(place.file)}:{place.line})"
            record.places += [place] * (place not in record.places)
        record.reasons += [text] * (text not in record.reasons)
    del record.reasons[MAX_REASONS:]
    return record
