"""The page of a profile, for the terminal and as HTML: findings first, then the data behind them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from flatout.render import machine
from flatout.render.formatting import (
    MISSING,
    capital,
    count,
    factor,
    finite,
    interval,
    is_positive,
    milliseconds,
    on_device,
    per_second,
    plural,
    rounded,
    sentence,
    shell,
    size,
)
from flatout.render.page import (
    PAGE,
    Cell,
    Code,
    Figure,
    Page,
    PagePart,
    Paragraph,
    Section,
    Table,
    dateline,
    notes,
)
from flatout.render.phases import ProgramPhases, phase_figure, phase_kind
from flatout.render.plot import (
    Interval,
    Plot,
    Scale,
    byte_ticks,
    intervals,
    number_ticks,
    padded_scale,
    ratio_scale,
    ratio_ticks,
)
from flatout.render.summary import ratio_text
from flatout.schema.findings import Severity, SourceLocation
from flatout.schema.profile import (
    MEMORY_KINDS,
    LoaderRecord,
    MemoryGrowth,
    MemoryProfile,
    Operation,
    ProfileRecord,
    SyncRecord,
    WhatIf,
)

MAX_OPERATIONS = 20
MIN_OVERLAP = 0.01  # of the device's work
BOUNDS = {
    "data": "it waits for data",
    "python": "Python limits it",
    "launch": "launch overhead limits it",
    "copy": "copies to the device limit it",
    "memory": "memory bandwidth limits it",
    "compute": "arithmetic limits it",
    "optimizer": "the optimizer limits it",
}
WHAT_IF_OF_PHASE = {"data": "loader", "copy": "copies", "optimizer": "optimizer"}


def profile_page(profile: ProfileRecord) -> Page:
    """Return the page, a shorter one for a profile that failed or is still running."""
    failed = profile.status == "failed"
    sections = [
        _findings(profile),
        _step(profile),
        _parallel_section(profile),
        _what_ifs(profile),
        _operations(profile),
        _synchronisations(profile),
        _loaders(profile),
        *([_memory(profile.memory, profile.cwd)] if profile.memory else []),
        *_growth(profile),
        _also_measured(profile),
        notes(map(sentence, profile.notes)),
        Section("The machine and the program", [Table((), machine.facts(profile))], PAGE),
    ]
    return Page(
        "profile",
        headline(profile),
        "profile.json",
        sections,
        subtitle(profile),
        command=profile.command,
        dateline=dateline(profile.created, machine.device(profile)),
        tone="bad" if failed else "",
        next_step=next_step(profile),
        version=profile.flatout,
    )


def headline(profile: ProfileRecord) -> str:
    if profile.status == "failed":
        return "The program could not be profiled"
    if finite(profile.step_ms) is None:
        return "Nothing was measured yet"
    why = BOUNDS.get(profile.bound)
    text = f"A {profile.unit} takes {milliseconds(profile.step_ms)}" + (f": {why}" if why else "")
    return text + (f"; {profile.disturbance}" if profile.disturbance else "")


def subtitle(profile: ProfileRecord) -> str:
    """Return what limits the step, and the findings, in two sentences."""
    if profile.status == "failed":
        return profile.message
    if finite(profile.step_ms) is None:
        return ""
    why = capital(sentence(profile.bound_why)) + " " if profile.bound_why else ""
    if not profile.findings:
        return f"{why}Nothing worth changing by hand. `flatout tune` looks for optimisations that need no code changes."
    gains = [finding.predicted for finding in profile.findings if finding.predicted]
    best = max(gains, key=lambda ratio: ratio.median, default=None)
    gain = f"; the largest could make a {profile.unit} up to {factor(best.median)} as fast" if best else ""
    return f"{why}{plural(len(profile.findings), 'finding')}{gain}."


def next_step(profile: ProfileRecord) -> tuple[str, str]:
    if not profile.command:
        return "", ""
    command = shell([*on_device(profile.machine), *profile.command])
    if profile.tensor_growth is not None and profile.tensor_growth.leaking:
        why = "Memory grows with every step; profile it over more steps:"
        return why, f"flatout profile --memory {command}"
    return "Find the fastest plan; these findings are tried first:", f"flatout tune {command}"


def _findings(profile: ProfileRecord) -> Section:
    parts: list[PagePart] = []
    for finding in profile.findings:
        predicted = f" up to {ratio_text(finding.predicted)} predicted" if finding.predicted else ""
        tone = " bad" if finding.severity == Severity.WRONG else ""
        title = f"{capital(finding.name.replace('_', ' '))} ({finding.rule}, {finding.severity})"
        parts.append(Paragraph(f"{title}: {sentence(finding.message)}{predicted}", f"verdict{tone}"))
        if finding.place:
            parts.append(Paragraph(f"{place_of(finding.place, profile.cwd)}  `{finding.place.text}`"))
        parts += [Paragraph(line, "note") for line in finding.evidence[:8]]
        parts.append(Code(finding.fix.strip("\n")))
        levers = f"Without editing: `flatout tune` tries {', '.join(finding.levers)}"
        parts.append(Paragraph("; ".join(filter(None, (levers if finding.levers else "", finding.how)))))
    return Section("Findings", parts)


def place_of(place: SourceLocation | None, cwd: str = "") -> str:
    """Return the place as text. Paths inside the program's folder are shown relative to it."""
    if place is None:
        return ""
    return replace(place, file=place.file.removeprefix(cwd.rstrip("/") + "/")).sentence()


def _step(profile: ProfileRecord) -> Section:
    unit = profile.unit
    ratios = {what_if.name: what_if.ratio for what_if in profile.what_ifs}
    phases_of_step = ProgramPhases.read("", profile.phases, profile.mean_step_ms)
    phases = [
        (
            Cell(name, kind=phase_kind(name)),
            Cell(milliseconds(time.median_ms), f"{rounded(time.low_ms)}–{rounded(time.high_ms)}"),
            f"{100 * time.share:.0f} %",
            ratio_text(ratio) if (ratio := ratios.get(WHAT_IF_OF_PHASE.get(name, ""))) else "",
        )
        for name, time in phases_of_step.phases.items()
        if time.share >= 0.0005 or ratios.get(WHAT_IF_OF_PHASE.get(name, ""))
    ]
    measured = f"{plural(profile.steps, 'step')} after {profile.warmup_steps} of warm-up, on {profile.device}"
    profiled = ""
    if profile.overhead is not None:
        profiled = f"{factor(profile.overhead.median)} as long, and excluded from these times"
    rows = (
        (unit, milliseconds(profile.step_ms)),
        ("samples", per_second(profile.samples_per_s)),
        ("measured", measured),
        ("first step", milliseconds(profile.first_step_ms)),
        ("FLOPs", _flops(profile)),
        ("operators a step", _operators(profile)),
        ("Python outside operators", milliseconds(profile.python_ms)),
        ("device idle", milliseconds(profile.idle_ms)),
        ("profiled steps", profiled),
    )
    shown = [row for row in rows if profile.steps and row[1] not in ("", MISSING)]
    caption = f"Shares of the mean {unit}. The share of a phase is not its possible speed-up, which is measured below."
    return Section(
        f"The {unit}",
        [
            replace(phase_figure([phases_of_step], unit), caption=caption),
            Table(("phase", ">median", ">share", "without it"), phases),
            Table((), shown),
        ],
    )


def _flops(profile: ProfileRecord) -> str:
    if not profile.flops_a_step:
        return ""
    share = f", {100 * profile.mfu:.0f} % of the measured peak" if profile.mfu else ""
    return f"{profile.flops_a_step / 1e9:.2f} GFLOP a step{share}"


def _operators(profile: ProfileRecord) -> str:
    if not profile.operators_a_step:
        return ""
    mean = f", {profile.operator_us:.0f} us each" if profile.operator_us else ""
    return f"{profile.operators_a_step:.0f}{mean}"


def _parallel_section(profile: ProfileRecord) -> Section:
    note = "This work overlaps with the phases above, and with itself."
    return Section("Beside the step", [Table((), list(_parallel_work(profile))), Paragraph(note, "note")])


def _parallel_work(profile: ProfileRecord) -> Iterator[tuple[str, str]]:
    for loader in profile.loaders:
        if loader.workers and loader.fetch_ms and finite(loader.fetch_ms):
            ms, wait_ms = loader.fetch_ms / loader.workers, loader.wait_ms
            work = f"{milliseconds(ms)} a step; a batch takes {milliseconds(loader.fetch_ms)}"
            waits = f"{milliseconds(wait_ms)} waited for, {milliseconds(max(0.0, ms - wait_ms))} hidden"
            yield plural(loader.workers, "loader worker"), f"{work}; {waits}"
    device = {kind: ms for kind, ms in profile.device_ms.items() if ms > 0 and finite(ms)}
    busy = profile.step_ms - profile.idle_ms if profile.step_ms and profile.idle_ms is not None else None
    total = sum(device.values())
    overlap = total - busy if busy is not None and total - busy > MIN_OVERLAP * total else 0.0
    for kind, ms in device.items():
        overlaps = overlap and kind == "computing"
        overlapping = f"; {milliseconds(overlap)} on the device overlap" if overlaps else ""
        yield f"device, {kind}", f"{milliseconds(ms)} a step{overlapping}"


def _what_ifs(profile: ProfileRecord) -> Section:
    rows = []
    for what_if in profile.what_ifs:
        text = sentence(f"not measured: {what_if.why_not}")
        if what_if.ratio is not None:
            step = f", {milliseconds(what_if.step_ms)} a step" if what_if.step_ms else ""
            text = f"{ratio_text(what_if.ratio)} as fast{step}"
        rows.append((what_if.name, text))
    caption = (
        f"Speed of a {profile.unit} without each of these costs. Each was switched off and on alternately inside the running program. The "
        "ratio is an upper bound for the speed-up from a fix. A full dot is a certain gain."
    )
    plot = what_if_plot(profile.what_ifs)
    return Section("Possible speed-ups", [Figure(plot, caption), Table(("without", "speed"), rows)])


def _operations(profile: ProfileRecord) -> Section:
    operations = sorted(profile.operations, key=lambda operation: -operation.share)[:MAX_OPERATIONS]
    cores = {True: "Tensor Cores", False: "no Tensor Cores", None: ""}
    rows = [
        (
            Cell(
                operation.name.removeprefix("aten::"),
                " ".join([*operation.dtypes[:2], *operation.shapes[:2]]),
            ),
            f"{100 * operation.share:.0f} %",
            rounded(operation.self_ms),
            rounded(operation.calls),
            Cell(_limit(operation), cores[operation.tensor_cores]),
            place_of(operation.place, profile.cwd),
        )
        for operation in operations
    ]
    columns = ("operation", ">share", ">ms", ">calls", "limit", "line")
    return Section("Operations", [Table(columns, rows)])


def _limit(operation: Operation) -> str:
    if operation.limit in ("", "unknown"):
        return ""
    share = operation.roofline
    return operation.limit + (f", {100 * share:.0f} % of the possible speed" if share is not None else "")


def _synchronisations(profile: ProfileRecord) -> Section:
    rows = [
        (
            Cell(_where(sync.place, profile.cwd), sync.place.text if sync.place else ""),
            _kind(sync),
            rounded(sync.calls),
            rounded(sync.ms),
            size(sync.moved_bytes) if sync.moved_bytes else "",
        )
        for sync in sorted(profile.synchronisations, key=lambda sync: -sync.ms)
    ]
    unit = profile.unit
    columns = ("line", "synchronisation", f">calls a {unit}", f">ms a {unit}", f">bytes a {unit}")
    note = "On a GPU each of these can block the program until the device has finished its queued work; on a CPU they cost little."
    return Section("Device synchronisations", [Table(columns, rows), Paragraph(note, "note")])


def _kind(sync: SyncRecord) -> str:
    pinned = {True: "pinned", False: "pageable", None: ""}[sync.pinned]
    blocking = {True: "non-blocking", False: "blocking", None: ""}[sync.non_blocking]
    return ", ".join(filter(None, (sync.kind, pinned, blocking)))


def _where(place: SourceLocation | None, cwd: str) -> str:
    return place_of(place, cwd) or "outside your files"


def _loaders(profile: ProfileRecord) -> Section:
    rows = [
        (
            Cell(_where(loader.place, profile.cwd), loader.dataset),
            Cell(_settings(loader), _slowest(loader, profile.cwd)),
            f"{count(loader.created)}, {count(loader.iterators)}",
            rounded(loader.wait_ms),
            rounded(loader.fetch_ms),
        )
        for loader in profile.loaders
    ]
    columns = ("line", "settings", ">created, iterated", f">wait, ms a {profile.unit}", ">fetch, ms a batch")
    return Section("Loaders", [Table(columns, rows)])


def _settings(loader: LoaderRecord) -> str:
    settings = [
        f"batches of {count(loader.batch_size)}" if loader.batch_size else "",
        plural(loader.workers, "worker"),
        "pinned" if loader.pin_memory else "",
        "kept between epochs" if loader.persistent_workers else "",
    ]
    return ", ".join(filter(None, settings))


def _slowest(loader: LoaderRecord, cwd: str) -> str:
    if loader.slow_place is None or not loader.slow_share:
        return ""
    return f"{100 * loader.slow_share:.0f} % of the fetching in {place_of(loader.slow_place, cwd)}"


def _memory(memory: MemoryProfile, cwd: str) -> Section:
    where = "on the device" if memory.where == "device" else "in host memory"
    text = [f"The peak of the tensors in a step, {where}, is {size(memory.peak_bytes)}"]
    if memory.peak_place:
        text.append(f"reached at {place_of(memory.peak_place, cwd)}")
    if memory.reserved_bytes:
        text.append(f"of {size(memory.reserved_bytes)} reserved")
    if memory.retries:
        text.append(f"the allocator released memory and retried {memory.retries} times")
    modules = sorted(memory.by_module.items(), key=lambda module: -module[1])[:12]
    kinds = sorted(memory.at_peak.items(), key=lambda part: -part[1])
    kind_rows = [(Cell(kind, kind=memory_colour(kind)), size(amount)) for kind, amount in kinds if amount > 0]
    module_rows = [(Cell(name, kind="code"), size(amount)) for name, amount in modules]
    return Section(
        "Memory",
        [
            Paragraph(sentence(", ".join(text))),
            Figure(memory_plot(memory), "Memory over one step, stacked in the order of its kinds."),
            Table(("at the peak", ">amount"), kind_rows),
            Table(("activations of", ">at the peak"), module_rows),
        ],
    )


def _growth(profile: ProfileRecord) -> Iterator[Section]:
    for name, leak in (("tensors", profile.tensor_growth), ("the process", profile.host_growth)):
        if leak is None or (leak is profile.host_growth and not leak.leaking):
            continue
        tone = "bad" if leak.leaking else "good"
        chart = Figure(growth_plot(leak), "Memory at the same point of each step.")
        title = f"Memory of {name} grows" if leak.leaking else "Does memory grow?"
        yield Section(title, [Paragraph(_leak(leak, profile.unit, profile.cwd), f"verdict {tone}"), chart])


def _leak(leak: MemoryGrowth, unit: str, cwd: str) -> str:
    steps = plural(leak.steps or len(leak.series), "step")
    if not leak.leaking:
        return f"No: the trend over {steps} is not significant."
    holder = f", held by {leak.holder}" if leak.holder else ""
    place = f", added at {place_of(leak.place, cwd)}" if leak.place else ""
    graph = "; it keeps an autograd graph alive" if leak.graph else ""
    return sentence(
        f"{size(leak.bytes_a_step)} more after each {unit}, over {steps} (chance {leak.p_value:.1g}){holder}{place}{graph}"
    )


def _also_measured(profile: ProfileRecord) -> Section:
    rows: list[tuple[str, str]] = []
    if profile.gc_calls:
        text = f"{profile.gc_calls:.2f} collections a step, {milliseconds(profile.gc_ms)} in all; the longest {milliseconds(profile.gc_longest_ms)}"
        rows.append(("garbage", text))
    if (compiled := profile.compile_record) is not None:
        graphs = f"{compiled.graphs} graphs, {compiled.recompiles} recompilations"
        breaks = f"{compiled.breaks} graph breaks, {milliseconds(compiled.ms)} of compiling"
        rows.append(("compiled", f"{graphs}, {breaks}"))
        rows += [("", reason) for reason in compiled.reasons[:4]]
    rows += [("attention", text) for text in profile.settings.get("attention", ())]
    rows += list(_idle(profile))
    return Section("Also measured", [Table((), rows)])


def _idle(profile: ProfileRecord) -> Iterable[tuple[str, str]]:
    for gap in profile.idle_gaps[:3]:
        place = f" at {place_of(gap.place, profile.cwd)}" if gap.place else ""
        yield "device idle", f"{milliseconds(gap.ms)} a step while the host was in {gap.host_activity}{place}"


def what_if_plot(what_ifs: Sequence[WhatIf]) -> Plot | None:
    """Return a row per measured what-if. A full dot marks a certain gain."""
    rows = []
    for what_if in what_ifs:
        ratio = what_if.ratio
        if ratio is not None and all(map(is_positive, (ratio.median, ratio.low, ratio.high))):
            text = f"{what_if.name}  {factor(ratio.median)} ({interval(ratio.low, ratio.high)})"
            kind = "kept" if ratio.significant else "dropped"
            rows.append(Interval(text, ratio.median, ratio.low, ratio.high, kind))
    if not rows:
        return None
    rows.sort(key=lambda row: -row.value)
    scale = ratio_scale([v for row in rows for v in (row.value, row.low, row.high) if v is not None])
    ticks = [(tick, f"{tick:g}x") for tick in ratio_ticks(scale)]
    return intervals("What-ifs: " + "; ".join(row.text for row in rows), rows, scale, ticks)


def memory_colour(kind: str) -> str:
    return f"c{MEMORY_KINDS.index(kind)}" if kind in MEMORY_KINDS else "c6"


def memory_plot(memory: MemoryProfile) -> Plot | None:
    """Return the kinds of memory over a step, stacked."""
    points = [(finite(point.ms), point.kinds) for point in memory.timeline]
    samples = [
        (ms, {kind: max(0.0, finite(amount) or 0.0) for kind, amount in kinds.items()})
        for ms, kinds in points
        if ms is not None
    ]
    shown = [kind for kind in MEMORY_KINDS if any(kinds.get(kind) for _, kinds in samples)]
    if len(samples) < 2 or not shown:
        return None
    peak = max(sum(kinds.values()) for _, kinds in samples)
    x, y = Scale(samples[0][0], samples[-1][0]), Scale(0.0, peak * 1.05)
    label = f"Memory over a step: at most {size(peak)}"
    plot = Plot(label, x, y, number_ticks(x, unit=" ms"), byte_ticks(y), axis="of a step", grid=False)
    below = [0.0] * len(samples)
    for kind in shown:
        above = [base + kinds.get(kind, 0.0) for base, (_, kinds) in zip(below, samples, strict=True)]
        area = [(ms, low, high) for (ms, _), low, high in zip(samples, below, above, strict=True)]
        tip = f"{kind}: at most {size(max(kinds.get(kind, 0.0) for _, kinds in samples))}"
        plot.area(area, memory_colour(kind), tip)
        below = above
    return plot


def growth_plot(leak: MemoryGrowth) -> Plot | None:
    """Return memory at the same point of each step."""
    series = [value for v in leak.series if (value := finite(v)) is not None]
    if len(series) < 3:
        return None
    x, y = Scale(1, len(series)), padded_scale(series)
    label = f"Memory at the same point of {len(series)} steps, from {size(series[0])} to {size(series[-1])}"
    plot = Plot(label, x, y, number_ticks(x), byte_ticks(y), 150, "step")
    plot.line(
        [(float(step), value) for step, value in enumerate(series, 1)], "bad" if leak.leaking else "plain"
    )
    return plot
