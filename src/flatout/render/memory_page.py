"""The page of the predicted memory of a step, for the terminal and as HTML."""

from flatout.render.formatting import count, plural, sentence, size
from flatout.render.page import Cell, Items, Page, Section, Table, dateline, notes
from flatout.schema.batch import FORECAST_KINDS, MemoryForecast, MemoryPoint

MAX_MODULES = 8
PEAK = "peak of the tensors in a step"


def memory_page(record: MemoryForecast) -> Page:
    own = record.own_point()
    predicted = [point for point in record.points if not point.why_not]
    kinds = [kind for kind in FORECAST_KINDS if any(point.kinds.get(kind, 0) > 0 for point in record.points)]
    names = [Cell(PEAK, kind="strong"), Cell("measured"), *map(Cell, kinds)]
    columns = [_cells(point, kinds) for point in predicted]
    table = Table(
        ("samples a batch", *(f">{_column_name(point, record)}" for point in predicted)),
        [[name, *row] for name, row in zip(names, zip(*columns, strict=True), strict=True) if any(row)]
        if predicted
        else [],
    )
    modules = sorted(own.by_module.items(), key=lambda module: -module[1]) if own is not None else []
    failed = [point for point in record.points if point.why_not]
    failures = [f"{plural(point.batch_size, 'sample')}: {sentence(point.why_not)}" for point in failed]
    activations = Table(
        ("module", ">amount"), [(name, size(amount)) for name, amount in modules[:MAX_MODULES]]
    )
    return Page(
        "predicted memory of a step",
        headline(record),
        "memory.json",
        [
            Section("Peak of the tensors in a step, by batch size", [table, Items(failures)]),
            Section("Activations by module", [activations]),
            notes(map(sentence, record.notes)),
        ],
        summary(record) or sentence(record.message),
        command=record.command,
        dateline=dateline(record.created, record.device),
        version=record.flatout,
    )


def headline(record: MemoryForecast) -> str:
    own = record.own_point()
    if own is None or own.peak_bytes is None:
        return "The memory of a step is not known"
    batch = f" with {count(record.own_size)} samples a batch" if record.own_size else ""
    device = f"the {record.device.upper()}"
    device = "a CUDA device" if record.simulated or record.device == "cuda" else device
    return f"A step{batch} takes {size(own.peak_bytes)} of tensors on {device}"


def summary(record: MemoryForecast) -> str:
    """Return the prediction error, the largest batch that fits, and advice."""
    sentences = [text for point in record.points if (text := accuracy_sentence(point))]
    if record.limit_bytes is not None and record.largest is not None:
        limit = f"{size(record.limit_bytes)} ({record.limit_source})"
        sentences.append(
            f"The largest batch that is predicted to fit into {limit} has {plural(record.largest, 'sample')}, "
            f"{size(record.largest_peak_bytes)}."
            if record.largest
            else f"Not even one sample is predicted to fit into {limit}."
        )
    return " ".join([*sentences, *filter(None, [record.advice])])


def accuracy_sentence(point: MemoryPoint) -> str:
    batch = f"with {count(point.batch_size)} samples " if point.batch_size else ""
    if point.error is not None:
        error_text = f"{abs(point.error):.1%} too {'high' if point.error > 0 else 'low'}"
        error_text = "right to 0.1 %" if abs(point.error) < 0.001 else error_text
        return f"A real step {batch}took {size(point.measured_bytes)}: the prediction was {error_text}."
    why = point.measured_why_not
    return sentence(f"It could not be measured {batch}({why})") if why else ""


def _cells(point: MemoryPoint, kinds: list[str]) -> list[str]:
    error = f" ({round(point.error, 3) + 0.0:+.1%})" if point.error is not None else ""
    return [
        size(point.peak_bytes),
        f"{size(point.measured_bytes)}{error}" if error else "",
        *(size(point.kinds[kind]) if point.kinds.get(kind) else "" for kind in kinds),
    ]


def _column_name(point: MemoryPoint, record: MemoryForecast) -> str:
    if point.batch_size is None:
        return "its own"
    mark = {record.largest: " (fits)", record.own_size: " (its own)"}.get(point.batch_size, "")
    return count(point.batch_size) + mark
