"""Names what limits a step: data, copies, the optimizer, Python, launches, memory or compute.

The bound is the largest share of the step. A measured what-if gives its share directly: the part of the step
that it removes. The rest is split between Python and the operators in proportion to the time recorded in
them.
"""

from flatout.schema.profile import Operation, ProfileRecord

LAUNCH_BOUND_US = 10.0  # a shorter call is mostly launch overhead
MAX_INTERVAL = 0.3  # of the step: a what-if whose interval is wider says nothing
WHAT_IF_OF_BOUND = {"data": "loader", "copy": "copies", "optimizer": "optimizer"}
PYTHON_WHAT_IFS = ("syncs", "logging", "gc")
WHAT_IF_TEXTS = {
    "loader": "batches prepared in advance",
    "copies": "batches on the device already",
    "optimizer": "an optimizer that does nothing",
    "syncs": "no synchronisation",
    "logging": "no messages",
    "gc": "no garbage collection",
}


def shares(profile: ProfileRecord) -> dict[str, float]:
    """The share of the step by bound, without unknown bounds. The shares add up to at most about 1."""
    bounds: dict[str, float] = {}
    for bound, name in WHAT_IF_OF_BOUND.items():
        gain = removed_share(profile, name)
        if gain is not None:
            bounds[bound] = gain
    if "data" not in bounds and "data" in profile.phases:
        bounds["data"] = profile.phases["data"].share
    rest = max(0.0, 1.0 - sum(bounds.values()))
    if profile.step_ms and profile.python_ms is not None:
        python_ms = (
            sum(gap.ms for gap in profile.idle_gaps if gap.host_activity == "python")
            if profile.idle_ms is not None
            else profile.python_ms
        )
        gains = [gain for name in PYTHON_WHAT_IFS if (gain := removed_share(profile, name)) is not None]
        bounds["python"] = min(rest, max(python_ms / profile.step_ms, *gains, 0.0))
        rest -= bounds["python"]
    if profile.step_ms and profile.idle_ms is not None:
        bounds["launch"] = min(
            rest, sum(gap.ms for gap in profile.idle_gaps if gap.host_activity != "python") / profile.step_ms
        )
        rest -= bounds["launch"]
    times = _ms_by_limit(profile)
    for limit, ms in times.items():
        bounds[limit] = bounds.get(limit, 0.0) + rest * ms / sum(times.values())
    return bounds


def removed_share(profile: ProfileRecord, name: str) -> float | None:
    """The share of the step that a what-if removes; 0.0 if it is within the noise.

    None if it was not measured, or not well enough."""
    ratio = next((what_if.ratio for what_if in profile.what_ifs if what_if.name == name), None)
    if ratio is None or 1.0 / ratio.low - 1.0 / ratio.high > MAX_INTERVAL:
        return None
    return 1.0 - 1.0 / ratio.median if ratio.significant else 0.0


def name_bottleneck(profile: ProfileRecord) -> tuple[str, str]:
    """The bound and one sentence of evidence.

    Returns two empty strings if the unexplained part of the step exceeds the largest share."""
    bounds = {bound: share for bound, share in shares(profile).items() if share > 0}
    if not bounds or not profile.step_ms:
        return "", ""
    largest, *others = sorted(bounds, key=lambda bound: -bounds[bound])
    if bounds[largest] < 1.0 - sum(bounds.values()):
        return "", ""
    others = [f"{bound} {bounds[bound]:.0%}" for bound in others if bounds[bound] >= 0.05]
    then = f"; then {', '.join(others)}" if others else ""
    return (
        largest,
        f"{largest} takes {bounds[largest]:.0%} of the {profile.unit}: {_evidence(profile, largest)}{then}",
    )


def _evidence(profile: ProfileRecord, bound: str) -> str:
    name = WHAT_IF_OF_BOUND.get(bound)
    what_if = next((w for w in profile.what_ifs if w.name == name and w.ratio is not None), None)
    if what_if is not None and what_if.ratio is not None and removed_share(profile, what_if.name) is not None:
        return f"with {WHAT_IF_TEXTS[what_if.name]} it is {what_if.ratio.sentence()} as fast"
    if bound == "data":
        return "the step waited for the loader"
    if bound == "python":
        gains = {name: gain for name in PYTHON_WHAT_IFS if (gain := removed_share(profile, name))}
        best = max(gains, key=lambda name: gains[name], default=None)
        saving = f"; {WHAT_IF_TEXTS[best]} would save {gains[best]:.0%}" if best else ""
        return f"{profile.python_ms or 0:.2f} ms outside operators{saving}"
    if bound == "launch":
        calls = f"{profile.operators_a_step:.0f} operators" if profile.operators_a_step else "its operators"
        mean = f" of {profile.operator_us:.0f} us on average" if profile.operator_us else ""
        idle = f", and the device is idle for {profile.idle_ms:.2f} ms" if profile.idle_ms else ""
        return f"{calls}{mean}, most of it launch overhead{idle}"
    largest = next((o for o in profile.operations if limit_of(o) == bound), None)
    if largest is None:
        return "the operators' own time"
    text = (
        f"the largest such operator, {largest.name}, takes {largest.share:.0%} of the time of all operators"
    )
    if not profile.ceilings:
        text += " (judged by the kind of operator; to compare with this machine's peak rates, run `flatout doctor --bench` once)"
    return text


def _ms_by_limit(profile: ProfileRecord) -> dict[str, float]:
    times: dict[str, float] = {}
    for operation in profile.operations:
        ms = operation.self_ms
        if ms > 0:
            times[limit_of(operation)] = times.get(limit_of(operation), 0.0) + ms
    return times


def limit_of(operation: Operation) -> str:
    """The limit by measured ceilings.

    Without ceilings: launch for short calls, compute for calls with FLOPs, memory for others."""
    if operation.limit not in ("", "unknown"):
        return operation.limit
    if 1000 * operation.self_ms / max(operation.calls, 1e-9) < LAUNCH_BOUND_US:
        return "launch"
    return "compute" if operation.flops else "memory"
