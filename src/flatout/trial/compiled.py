"""Reads what torch.compile did from torch's counters: graphs, recompilations, graph breaks, lines."""

from __future__ import annotations

import re
import sys

from flatout.agent.frames import is_users, place_at
from flatout.schema.profile import Compiled

# Temporary hooks with which flatout finds root modules; not caused by the program
OF_OURS = "._global_forward_"
IN_A_REASON = re.compile(r'File "([^"]+)", line (\d+)')


def compiled() -> Compiled | None:
    """Return the compiler's record; None if nothing was compiled. Loads nothing."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None or not dynamo.counters["frames"].get("total"):
        return None
    breaks = dynamo.counters.get("graph_break", {})
    found = Compiled(
        graphs=int(dynamo.counters["stats"].get("unique_graphs", 0)), breaks=int(sum(breaks.values()))
    )
    found.reasons = [_sentence(reason) for reason, _ in breaks.most_common(8)] if breaks else []
    lines = []
    for metrics in list(getattr(dynamo, "_compilation_metrics", ())):
        file, line = getattr(metrics, "co_filename", None), getattr(metrics, "co_firstlineno", None)
        found.ms += 1000 * (getattr(metrics, "entire_frame_compile_time_s", None) or 0.0)
        reason = getattr(metrics, "recompile_reason", None)
        if reason and OF_OURS not in reason:
            found.recompiles += 1
            found.reasons.append(f"recompiled: {_sentence(reason)}")
            if file and line and is_users(file):
                lines.append((file, line))
    for reason in breaks:
        lines += [(file, int(line)) for file, line in IN_A_REASON.findall(reason) if is_users(file)]
    found.reasons = list(dict.fromkeys(found.reasons))[:12]
    found.places = [place_at(file, line) for file, line in dict.fromkeys(lines)]
    return found


def _sentence(reason: str) -> str:
    return " ".join(reason.strip().split("\n")[0].split())[:240]
