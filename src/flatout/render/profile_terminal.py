"""Terminal output of a profile, for 80 columns or more: bottleneck, causes and next command."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from flatout.render.formatting import milliseconds, on_device, shell, size
from flatout.render.parallel_work import parallel_table
from flatout.render.terminal import pairs, section, table_of, text
from flatout.schema.findings import Finding, SourceLocation
from flatout.schema.profile import MemoryGrowth, MemorySeen, Operation, ProfileRecord, SyncRecord

OPERATIONS = 8
SYNCHRONISATIONS = 8
MODULES = 5
FINDINGS = 8
WITHOUT = {
    "loader": "without the loader",
    "copies": "without copies",
    "optimizer": "without the optimizer",
    "syncs": "without synchronisation",
    "logging": "without logging",
    "gc": "without garbage collection",
    "one thread fewer": "one thread fewer",
    "one thread more": "one thread more",
}
OF_A_PHASE = {"data": "loader", "copy": "copies", "optimizer": "optimizer"}
STYLES = {
    "wrong result": "bold red",
    "wasted time": "bold yellow",
    "wasted memory": "bold yellow",
    "fragile": "bold",
}


def profile_tables(profile: ProfileRecord) -> RenderableType:
    """Return the output of `flatout profile`."""
    lines: list[RenderableType] = [Text(headline(profile), style="bold")]
    lines.append(Text(_below(profile), style="dim"))
    for part in (
        _phases(profile),
        parallel_table(profile),
        _what_ifs(profile),
        _operations(profile),
        _synchronisations(profile),
        _loaders(profile),
        _memory(profile),
        _findings(profile),
        _others(profile),
    ):
        lines += section(part)
    why, command = next_step(profile)
    lines += ["", Text(why), Padding(Text(command, style="bold", overflow="fold"), (0, 0, 0, 2))]
    return Group(*lines)


def headline(profile: ProfileRecord) -> str:
    if not profile.step_ms:
        return "no step was measured"
    rate = f", {profile.samples_per_s:,.0f} samples/s" if profile.samples_per_s else ""
    step = f"{milliseconds(profile.step_ms)} a {profile.unit}{rate}"
    return f"{profile.bound}-bound: {step}. {profile.bound_why}" if profile.bound else step


def next_step(profile: ProfileRecord) -> tuple[str, str]:
    command = shell([*on_device(profile.machine), *profile.command])
    if profile.leak is not None and profile.leak.leaking:
        return (
            "Memory grows with every step; profile it over more steps:",
            f"flatout profile --memory {command}",
        )
    return "Find the fastest plan; these findings are tried first:", f"flatout tune {command}"


def _below(profile: ProfileRecord) -> str:
    parts = [f"{profile.steps} steps after {profile.warmup_steps} of warm-up", profile.device]
    if profile.overhead is not None:
        parts.append(
            f"profiled steps took {profile.overhead.median:.2f}x as long and are excluded from these times"
        )
    return "; ".join(parts)


def _phases(profile: ProfileRecord) -> RenderableType | None:
    if not profile.phases:
        return None
    grid = table_of("phase", "median", "quartiles", "share", "without it")
    for column in grid.columns[1:4]:
        column.justify = "right"
    ratios = {what_if.name: what_if.ratio for what_if in profile.what_ifs}
    for name, phase in profile.phases.items():
        if phase.share < 0.0005 and not ratios.get(OF_A_PHASE.get(name, "")):
            continue
        ratio = ratios.get(OF_A_PHASE.get(name, ""))
        quartiles = f"{milliseconds(phase.low_ms)} - {milliseconds(phase.high_ms)}"
        grid.add_row(
            Text(name),
            Text(milliseconds(phase.median_ms)),
            Text(quartiles),
            Text(f"{phase.share:.0%}"),
            Text(ratio.sentence() if ratio else ""),
        )
    return grid


def _what_ifs(profile: ProfileRecord) -> RenderableType | None:
    rows = []
    for what_if in profile.what_ifs:
        name = WITHOUT.get(what_if.name, what_if.name)
        if what_if.ratio is None:
            rows.append((name, Text(f"not measured: {what_if.why_not}", style="dim", overflow="fold")))
        else:
            step = f", {milliseconds(what_if.step_ms)} a step" if what_if.step_ms else ""
            rows.append(
                (
                    name,
                    Text(
                        f"{what_if.ratio.sentence()} as fast{step}",
                        style="green" if what_if.ratio.low > 1.03 else "",
                        overflow="fold",
                    ),
                )
            )
    return (
        Group(
            Text("what-ifs: each cost is switched off and on in the running program", style="dim"),
            pairs(rows),
        )
        if rows
        else None
    )


def _operations(profile: ProfileRecord) -> RenderableType | None:
    if not profile.operations:
        return None
    grid = table_of("operator", "share", "calls", "of the possible", "limit", "line")
    for column in grid.columns[1:4]:
        column.justify = "right"
    for operation in profile.operations[:OPERATIONS]:
        grid.add_row(
            Text(_operator(operation), overflow="fold"),
            Text(f"{operation.share:.0%}"),
            Text(f"{operation.calls:.0f}"),
            Text("" if operation.roofline is None else f"{operation.roofline:.0%}"),
            Text("" if operation.limit == "unknown" else operation.limit),
            _place(operation.place),
        )
    said = []
    if profile.operators_a_step:
        mean = f", {profile.operator_us:.0f} us each" if profile.operator_us else ""
        said.append(f"{profile.operators_a_step:.0f} operators a step{mean}")
    if profile.python_ms is not None:
        said.append(f"{milliseconds(profile.python_ms)} of Python outside operators")
    if profile.flops_a_step:
        said.append(
            f"{profile.flops_a_step / 1e9:.2f} GFLOP a step"
            + (f", {profile.mfu:.0%} of the measured peak" if profile.mfu else "")
        )
    if profile.idle_ms is not None:
        said.append(f"the device is idle for {milliseconds(profile.idle_ms)}")
    return Group(grid, Text("; ".join(said), style="dim"))


def _operator(operation: Operation) -> str:
    cores = (
        ""
        if operation.tensor_cores is None
        else " (Tensor Cores)"
        if operation.tensor_cores
        else " (no Tensor Cores)"
    )
    dtype = f" {operation.dtypes[0]}" if operation.dtypes else ""
    return operation.name.removeprefix("aten::") + dtype + cores


def _synchronisations(profile: ProfileRecord) -> RenderableType | None:
    if not profile.synchronisations:
        return None
    grid = table_of("synchronisation", f"calls a {profile.unit}", f"time a {profile.unit}", "line")
    for column in grid.columns[1:3]:
        column.justify = "right"
    for synchronisation in profile.synchronisations[:SYNCHRONISATIONS]:
        grid.add_row(
            Text(_kind(synchronisation)),
            Text(f"{synchronisation.calls:.1f}"),
            Text(milliseconds(synchronisation.ms)),
            _place(synchronisation.place),
        )
    note = (
        ""
        if profile.device != "cpu"
        else "On a CPU these cost little, because nothing waits for a device. On a GPU each one stops the host."
    )
    left = len(profile.synchronisations) - SYNCHRONISATIONS
    more = f"{left} more in the record. " if left > 0 else ""
    return Group(grid, Text(more + note, style="dim")) if more or note else grid


def _kind(synchronisation: SyncRecord) -> str:
    if synchronisation.kind != "to device":
        return synchronisation.kind
    return (
        "to device, "
        + ("pinned" if synchronisation.pinned else "pageable")
        + ("" if synchronisation.non_blocking else ", blocking")
    )


def _loaders(profile: ProfileRecord) -> RenderableType | None:
    rows = []
    for seen in profile.loaders:
        words = [f"{seen.workers} workers, {milliseconds(seen.wait_ms)} of waiting a step"]
        if seen.fetch_ms is not None:
            slow = (
                f", most of it ({seen.slow_share:.0%}) in {_where(seen.slow_place)}"
                if seen.slow_place is not None and seen.slow_share
                else ""
            )
            words.append(f"a batch takes {milliseconds(seen.fetch_ms)} in the dataset{slow}")
        if seen.begun > 1 or seen.made > 1:
            words.append(
                f"made {seen.made}x, iterated over {seen.begun}x, {milliseconds(seen.start_ms)} until the first batch"
            )
        rows.append((_where(seen.place) or seen.dataset, text("; ".join(words))))
    return Group(Text("loaders", style="dim"), pairs(rows)) if rows else None


def _memory(profile: ProfileRecord) -> RenderableType | None:
    rows = []
    if profile.memory is not None:
        rows += _peak(profile.memory)
    for name, leak in (("tensors", profile.leak), ("process", profile.host_growth)):
        if leak is not None and leak.leaking:
            rows.append(
                (
                    f"{name} grow" if name == "tensors" else "process grows",
                    Text(_leak(leak), style="bold red", overflow="fold"),
                )
            )
    return Group(Text("memory", style="dim"), pairs(rows)) if rows else None


def _peak(memory: MemorySeen) -> list[tuple[str, Text]]:
    largest = sorted(((most, kind) for kind, most in memory.at_peak.items() if most), reverse=True)
    rows = [
        (
            "peak",
            text(
                f"{size(memory.peak_bytes)} of the tensors in a step, on the {memory.where}"
                + (f", at {_where(memory.peak_place)}" if memory.peak_place else "")
            ),
        ),
        ("of it", text(", ".join(f"{kind} {size(most)}" for most, kind in largest))),
    ]
    modules = list(memory.by_module.items())[:MODULES]
    if modules:
        rows.append(("activations", text(", ".join(f"{name} {size(most)}" for name, most in modules))))
    if memory.retries:
        rows.append(("allocator", text(f"released memory and retried {memory.retries} times")))
    return rows


def _leak(leak: MemoryGrowth) -> str:
    held = f", held by {leak.holder}" if leak.holder else ""
    place = f", added at {_where(leak.place)}" if leak.place is not None else ""
    graph = "; it keeps an autograd graph alive" if leak.graph else ""
    return f"{size(leak.bytes_a_step)} a step over {leak.steps} steps (chance {leak.chance:.1g}){held}{place}{graph}"


def _findings(profile: ProfileRecord) -> RenderableType | None:
    lines: list[RenderableType] = []
    for finding in profile.findings[:FINDINGS]:
        lines += _finding(finding)
    left = len(profile.findings) - FINDINGS
    return (
        Group(*lines, *([Text(f"{left} more in the record", style="dim")] if left > 0 else []))
        if lines
        else None
    )


def _finding(finding: Finding) -> list[RenderableType]:
    gain = f"  up to {finding.predicted.median:.2f}x" if finding.predicted else ""
    title = Text.assemble(
        (finding.rule, STYLES.get(finding.severity, "bold")),
        " ",
        (finding.said, ""),
        (gain, "green"),
        overflow="fold",
    )
    found: list[RenderableType] = [title]
    if finding.place is not None:
        found.append(
            Padding(
                Text.assemble(_where(finding.place), "  ", (finding.place.text, "cyan"), overflow="fold"),
                (0, 0, 0, 6),
            )
        )
    return found


def _others(profile: ProfileRecord) -> RenderableType | None:
    rows = []
    if profile.gc_calls:
        longest = milliseconds(profile.gc_longest_ms)
        rows.append(
            (
                "garbage",
                text(
                    f"{profile.gc_calls:.2f} collections a step, {milliseconds(profile.gc_ms)} in all; the longest {longest}"
                ),
            )
        )
    if profile.compiled is not None:
        seen = profile.compiled
        made = f"{seen.graphs} graphs, {seen.recompiles} recompilations, {seen.breaks} graph breaks"
        rows.append(("compiled", text(f"{made}, {milliseconds(seen.ms)} of compiling")))
        rows += [("", text(reason)) for reason in seen.reasons[:4]]
    rows += [
        (
            "device idle",
            text(
                f"{milliseconds(gap.ms)} a step while the host was in {gap.what}"
                + (f" at {_where(gap.place)}" if gap.place else "")
            ),
        )
        for gap in profile.idle_gaps[:3]
    ]
    rows += [("note", text(note)) for note in profile.notes]
    return pairs(rows) if rows else None


def _place(place: SourceLocation | None) -> Text:
    return Text(_where(place), overflow="fold")


def _where(place: SourceLocation | None) -> str:
    """Return the file name with line and function. The record has the full path."""
    if place is None:
        return ""
    return f"{place.file.rsplit('/', 1)[-1]}:{place.line}" + (f" {place.function}" if place.function else "")
