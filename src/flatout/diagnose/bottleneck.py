"""Names what limits a step: data, copies, the optimizer, Python, launches, memory or compute.

The bound is the largest share of the step. A measured what-if gives its share directly: the part of the step
that it removes. The rest is split between Python and the operators in proportion to the time recorded in
them.
"""

from __future__ import annotations

from flatout.schema.profile import Operation, ProfileRecord

SHORT_US = 10.0  # a shorter call is mostly launch overhead
WIDE = 0.3  # of the step: a what-if whose interval is wider says nothing
BY_WHAT_IF = {"data": "loader", "copy": "copies", "optimizer": "optimizer"}
OF_PYTHON = ("syncs", "logging", "gc")
WITHOUT = {
    "loader": "batches prepared in advance",
    "copies": "batches on the device already",
    "optimizer": "an optimizer that does nothing",
    "syncs": "no synchronisation",
    "logging": "no messages",
    "gc": "no garbage collection",
}


def shares(profile: ProfileRecord) -> dict[str, float]:
    """The share of the step by bound, without unknown bounds. The shares add up to at most about 1."""
    found: dict[str, float] = {}
    for bound, name in BY_WHAT_IF.items():
        gain = gain_of(profile, name)
        if gain is not None:
            found[bound] = gain
    if "data" not in found and "data" in profile.phases:
        found["data"] = profile.phases["data"].share
    rest = max(0.0, 1.0 - sum(found.values()))
    if profile.step_ms and profile.python_ms is not None:
        waiting = (
            sum(gap.ms for gap in profile.idle_gaps if gap.host_activity == "python")
            if profile.idle_ms is not None
            else profile.python_ms
        )
        gains = [gain for name in OF_PYTHON if (gain := gain_of(profile, name)) is not None]
        found["python"] = min(rest, max(waiting / profile.step_ms, *gains, 0.0))
        rest -= found["python"]
    if profile.step_ms and profile.idle_ms is not None:
        found["launch"] = min(
            rest, sum(gap.ms for gap in profile.idle_gaps if gap.host_activity != "python") / profile.step_ms
        )
        rest -= found["launch"]
    times = _times_of_limits(profile)
    whole = sum(times.values())
    for limit, ms in times.items():
        found[limit] = found.get(limit, 0.0) + rest * ms / whole
    return found


def gain_of(profile: ProfileRecord, name: str) -> float | None:
    """The share of the step that a what-if removes; 0.0 if it is within the noise.

    None if it was not measured, or not well enough.
    """
    ratio = next((what_if.ratio for what_if in profile.what_ifs if what_if.name == name), None)
    if ratio is None or 1.0 / ratio.low - 1.0 / ratio.high > WIDE:
        return None
    return 1.0 - 1.0 / ratio.median if ratio.significant else 0.0


def name_bottleneck(profile: ProfileRecord) -> tuple[str, str]:
    """The bound and one sentence of evidence.

    Returns two empty strings if the unexplained part of the step exceeds the largest share.
    """
    found = {bound: share for bound, share in shares(profile).items() if share > 0}
    if not found or not profile.step_ms:
        return "", ""
    bound = max(found, key=lambda each: found[each])
    if found[bound] < 1.0 - sum(found.values()):
        return "", ""
    others = sorted(
        (each for each in found if each != bound and found[each] >= 0.05), key=lambda each: -found[each]
    )
    beside = "; then " + ", ".join(f"{each} {found[each]:.0%}" for each in others) if others else ""
    return (
        bound,
        f"{bound} takes {found[bound]:.0%} of the {profile.unit}: {_evidence(profile, bound)}{beside}",
    )


def _evidence(profile: ProfileRecord, bound: str) -> str:
    name = BY_WHAT_IF.get(bound)
    what_if = next((w for w in profile.what_ifs if w.name == name and w.ratio is not None), None)
    if what_if is not None and what_if.ratio is not None and gain_of(profile, what_if.name) is not None:
        return f"with {WITHOUT[what_if.name]} it is {what_if.ratio.sentence()} as fast"
    if bound == "data":
        return "the step waited for the loader"
    if bound == "python":
        gains = {name: gain for name in OF_PYTHON if (gain := gain_of(profile, name))}
        best = max(gains, key=lambda each: gains[each], default=None)
        info = f"; {WITHOUT[best]} would save {gains[best]:.0%}" if best else ""
        return f"{profile.python_ms or 0:.2f} ms outside operators{info}"
    if bound == "launch":
        calls = f"{profile.operators_a_step:.0f} operators" if profile.operators_a_step else "its operators"
        mean = f" of {profile.operator_us:.0f} us on average" if profile.operator_us else ""
        idle = f", and the device is idle for {profile.idle_ms:.2f} ms" if profile.idle_ms else ""
        return f"{calls}{mean}, most of it launch overhead{idle}"
    heaviest = next((o for o in profile.operations if limit_source(o) == bound), None)
    by_kind = (
        ""
        if profile.ceilings
        else " (judged by the kind of operator; to compare with this machine's peak rates, run `flatout doctor --bench` once)"
    )
    return (
        f"the largest such operator, {heaviest.name}, takes {heaviest.share:.0%} of the time of all operators{by_kind}"
        if heaviest
        else "the operators' own time"
    )


def _times_of_limits(profile: ProfileRecord) -> dict[str, float]:
    times: dict[str, float] = {}
    for operation in profile.operations:
        own = operation.device_ms if operation.device_ms is not None else operation.host_ms
        if own > 0:
            times[limit_source(operation)] = times.get(limit_source(operation), 0.0) + own
    return times


def limit_source(operation: Operation) -> str:
    """The limit by measured ceilings.

    Without ceilings: launch for short calls, compute for calls with FLOPs, memory for others.
    """
    if operation.limit not in ("", "unknown"):
        return operation.limit
    own = operation.device_ms if operation.device_ms is not None else operation.host_ms
    if 1000 * own / max(operation.calls, 1e-9) < SHORT_US:
        return "launch"
    return "compute" if operation.flops else "memory"
