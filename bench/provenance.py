"""Where a figure comes from (device, versions, date), and the one way in which a benchmark writes its results.

A benchmark measures the checkout it lies in: importing this file puts ``src`` first on the path, for this process and for
the programs it starts. Results are a Markdown page and the raw records beside it, ``<theme>_<device>_<yyyymm>.md`` and
``.json``, and ``results/README.md`` is written anew from what is there. Paths of the machine are taken out of both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SRC = ROOT / "src"
RESULTS = HERE / "results"

sys.path.insert(0, str(SRC))
os.environ["PYTHONPATH"] = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])
# `python` in a command is the Python that runs the benchmark.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

from flatout.measure.clock import today  # noqa: E402
from flatout.plan.facts import Facts  # noqa: E402
from flatout.plan.folder import read_json, write_whole  # noqa: E402
from flatout.probe.machine import look  # noqa: E402
from flatout.tune.prior import device_kind  # noqa: E402

# theme, the command that makes it, what it answers
THEMES = (
    ("overhead", "python bench/overhead.py", "What being attached costs: microseconds a step, seconds at the start"),
    ("transparent", "python bench/open_set.py DIR --transparent", "Whether being attached changes anything: losses bit by bit, output, exit code"),
    ("open_set", "python bench/open_set.py DIR --experts", "What tuning brings on public training scripts, measured again beside an expert's plans"),
    ("time_to_accuracy", "python bench/time_to_accuracy.py DIR", "Training to the end, plain and tuned: the final metric, and the time to a metric"),
    ("check_open_set", "python bench/check_open_set.py DIR", "What `flatout check` says of public training scripts, each alarm judged by hand"),
    ("data", "python bench/data.py", "What the data path brings: the loader alone and in training, beside a batch that is ready and other libraries"),
    ("curves", "python bench/curves.py FOLDER", "Learning curves of a CIFAR-10 script, transforms one by one and batched: three seeds each"),
    ("regret", "python bench/regret.py", "How far the chosen plan is from the best of an exhaustive search"),
    ("search_simulator", "python bench/search_simulator.py", "How good a plan each way to search finds in a given time: simulated programs, intervals checked"),
    ("batch", "python bench/batch.py", "How far the batch size called fastest is from the best of a sweep; accumulation as computed and as measured"),
    ("memory_prediction", "python bench/memory_prediction.py [DIR]", "A step's peak memory, foretold without computing, beside the allocator's own events"),
    ("what_ifs", "python bench/what_ifs.py", "What-if bounds of a profile beside what really removing the thing brings"),
    ("zoo", "python bench/zoo.py", "Whether diagnosis names the fault that was planted: named first with its line, false alarms on healthy twins"),
    ("scaling", "python bench/scaling.py --here", "Steps on many devices as `flatout scale` foretells them, beside published runs and ranks on this machine"),
    ("loop", "python bench/loop.py", "What a loop costs that somebody else drives: `flatout.Loop` and other libraries beside the raw loop"),
    ("loop_faults", "python bench/loop_faults.py", "Out of memory injected at hundreds of places of a training with the Loop, one rank of two among them"),
    ("faults", "python bench/faults.py", "Saves that are killed at every point, lose power, are damaged: bad picks, and what torch.load reads without a word"),
    ("fuzz", "python bench/fuzz.py --minutes 60", "Hostile and mutated files given to everything that opens one: code run, time, memory, how it was refused"),
    ("resume", "python bench/resume.py --stall 120", "Trainings with the Loop killed at random until done: the same bits, lost steps, what saves cost"),
    ("distributed", "python bench/distributed.py DIR", "Public scripts for one process as several ranks: divided or refused, and the course of their losses"),
    ("exchange", "python bench/exchange.py", "What travels between ranks: bytes and waiting by way and bucket size, the loss with fewer exchanges"),
    ("rescue", "python bench/rescue.py DIR", "Public scripts killed under `run --rescue`: whether the save is what they had learned, bit for bit; its cost"),
    ("again", "python bench/again.py DIR", "Public scripts killed at random under `run --resume`: whether they go on exactly, weights and lines; how fast"),
    ("again_cost", "python bench/again_cost.py", "What the journal of exact resume costs a step, and how much of the step of public scripts that is"),
    ("again_pace", "python bench/again_pace.py", "How fast the steps of a small model are gone through again, and whether the training goes on the same"),
    ("traps", "python bench/traps.py", "Small programs that exact resume could get wrong, killed and typed again: exactly as undisturbed, or refused in words"),
    ("again_checks", "python bench/again_checks.py", "Each check of exact resume switched off: which program, refused with it, then goes on wrongly"),
    ("two_hosts", "python bench/two_hosts.py", "A training over two hosts whose link is cut and which are killed: goes on, begins again or ends, never a hang"),
    ("launcher", "python bench/launcher.py", "What outlives a launcher of several ranks that is killed; whether the rank that failed first is named"),
    ("supervise", "python bench/supervise.py --faults 60 --alarms 6 --kills 100 --told 100 --overhead 60",
     "Programs that hang, die and are told to end under `--supervise`: named after how long, false alarms, orphans, cost"),
    ("guard", "python bench/guard.py", "False accepts and false rejects of the guard"),
    ("explain", "python bench/explain.py", "Failures really provoked: explained live and from their text, mends tried; recorded ones of what needs a GPU"),
    ("kernels", "python bench/kernels.py", "Each kernel against its reference, torch.compile and the device's own roofline"),
    ("runs_gpu", "python bench/gpu/runs.py", "Whether it runs at all on a GPU: programs as they are, attached, under levers, interrupted, profiled, tuned"),
    ("kernels_gpu", "python bench/gpu/kernels.py", "The kernels on a GPU: bandwidth, memory, time, beside torch and Liger-Kernel"),
    ("memory", "python bench/memory.py", "What saves memory and what it costs: activations computed again, accumulation in the Loop"),
    ("memory_gpu", "python bench/gpu/memory.py", "Frontier of recompute and batch size, out of memory for real, the batch finder beside a sweep: a 124M GPT"),
    ("ranks_gpu", "python bench/gpu/ranks.py", "Several ranks on one GPU beside one process: gradients, losses, and memory by kind, divided and whole"),
    ("again_gpu", "python bench/gpu/again.py", "Exact resume on a GPU: plain scripts killed and gone on with"),
    ("trust_gpu", "python bench/gpu/trust.py", "Saves on a GPU: trainings killed and gone on with, what saves cost, a program that runs out of memory"),
    ("diagnosis_gpu", "python bench/gpu/diagnosis.py", "A profile on a GPU beside torch's events, sync debug mode, Nsight Compute; a leak, an out-of-memory"),
    ("tutorial", "python bench/gpu/tutorial.py", "ResNet-18 at 32x32: the tutorial, the informed one-liners, flatout"),
    ("gpt", "python bench/gpu/gpt.py", "GPT-2 124M in plain float32: as it is, the informed one-liners, flatout"),
    ("small", "python bench/gpu/small.py", "A network whose step waits for launches: as it is, the informed one-liners, flatout"),
)
NEEDS_GPU = {"runs_gpu", "kernels_gpu", "memory_gpu", "ranks_gpu", "again_gpu", "trust_gpu", "diagnosis_gpu", "tutorial", "gpt", "small"}
COLUMNS_OF_INDEX = ("theme", "question", "device", "date", "page", "made by")


def stamp(facts: Facts | None = None) -> dict[str, Any]:
    """Device, versions, date and how busy the machine was when the benchmark began."""
    facts = facts or look()
    gpus = [gpu.name for gpu in facts.gpus]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    from flatout import __version__

    return {
        "device": f"{', '.join(gpus) + ', ' if gpus else ''}{facts.cpu}, {facts.cores} cores, {facts.memory_bytes / 2**30:.0f} GiB",
        "slug": _slug(gpus[0]) if gpus else device_kind(facts).replace(" with ", "_"),
        "versions": {"python": facts.python, **facts.versions, "flatout": f"{__version__}{_commit()}"},
        "date": today(),
        "load_at_start": None if load is None else round(load, 2),
        "command": " ".join(["python", _of_repository(sys.argv[0]), *sys.argv[1:]]),
    }


def _slug(gpu: str) -> str:
    words = [word for word in gpu.lower().replace("-", " ").split() if word not in ("nvidia", "amd", "tesla", "geforce")]
    return "".join(c for c in "_".join(words[:2] if words[:1] == ["rtx"] else words[:1]) if c.isalnum() or c == "_") or "gpu"


def _commit() -> str:
    """The checkout's commit in brackets, with a + where files differ from it; nothing where there is no git."""
    try:
        short = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--", "src"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" ({short}{'+' if changed.strip() else ''})"


def _of_repository(path: str) -> str:
    try:
        return str(Path(path).resolve().relative_to(ROOT))
    except ValueError:
        return Path(path).name


def provenance_lines(made: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    busy = "" if made.get("load_at_start") is None else f" Load average at the start: {made['load_at_start']}."
    return f"Device: {made['device']}.  \nVersions: {versions}.  \nDate: {made['date']}.{busy}  \nCommand: `{made['command']}`"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Cells are plain text; a bar inside one would end it."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def result_paths(theme: str, made: Mapping[str, Any], folder: Path = RESULTS) -> tuple[Path, Path]:
    name = f"{theme}_{made['slug']}_{made['date'][:7].replace('-', '')}"
    return folder / f"{name}.md", folder / f"{name}.json"


def write_result(theme: str, made: Mapping[str, Any], page: str, raw: Mapping[str, Any], hidden: Mapping[str, str] | None = None,
                 folder: Path = RESULTS) -> tuple[Path, Path]:
    """Write the page and the raw records. ``hidden`` adds paths to those that are replaced by a word."""
    if theme not in {each for each, _, _ in THEMES}:
        raise ValueError(f"{theme} is not in THEMES: its page would be in no index")
    names = _hidden({**(hidden or {})})
    text, data = result_paths(theme, made, folder)
    write_whole(data, dense(_without({"theme": theme, "made": made, **raw}, names)))
    write_whole(text, str(_without(f"{page.rstrip()}\n\n{provenance_lines(made)}\n", names)))
    if folder == RESULTS:
        write_index()
    return text, data


def dense(record: Any) -> str:
    """JSON with a line for each item, and one line for each list of numbers."""
    return re.sub(r"\[[\s\d.eE,+-]+\]", lambda numbers: " ".join(numbers[0].split()).replace("[ ", "[").replace(" ]", "]"), json.dumps(record, indent=1)) + "\n"


def some_or_all(doc: str | None, what: str) -> argparse.Namespace:
    """What the command line of a benchmark of many things asks for. ``only``: names of some, whose rows are made anew; empty for all. ``out``: a folder."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"names of {what}, with commas; rows of others are kept as they were")
    parser.add_argument("--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results")
    asked = parser.parse_args()
    asked.only = set(filter(None, asked.only.split(",")))
    return asked


def read_result(theme: str, made: Mapping[str, Any], folder: Path = RESULTS) -> dict[str, Any]:
    """What an earlier run of this month has left, or nothing."""
    data = read_json(result_paths(theme, made, folder)[1])
    return data if isinstance(data, dict) else {}


def _hidden(extra: dict[str, str]) -> dict[str, str]:
    given = {word: "DIR" for word in sys.argv[1:] if Path(word).is_absolute()}
    known = {**given, **extra, str(ROOT): ".", sys.prefix: "ENVIRONMENT", tempfile.gettempdir(): "TMP", str(Path.home()): "~"}
    both = {**known, **{os.path.realpath(path): word for path, word in known.items()}}
    return {path: both[path] for path in sorted(both, key=len, reverse=True) if len(path) > 3}


def _without(thing: Any, names: Mapping[str, str]) -> Any:
    if isinstance(thing, str):
        for path, word in names.items():
            thing = thing.replace(path, word)
        return thing
    if isinstance(thing, Mapping):
        return {_without(key, names): _without(value, names) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_without(value, names) for value in thing]
    if isinstance(thing, float) and thing != thing:
        return None
    return thing


def write_index(folder: Path = RESULTS) -> None:
    """``README.md`` of the results: one row for each page there is, and one for each benchmark that has none."""
    rows = []
    for theme, command, question in THEMES:
        records = {path: read_json(path) or {} for path in sorted(folder.glob(f"{theme}_*.json"), reverse=True)}
        found = {path: data.get("made", {}) for path, data in records.items() if data.get("theme") == theme}  # one theme's name may begin another's
        for path, made in found.items():
            page = path.with_suffix(".md").name
            rows.append((theme, question, made.get("device", "?"), made.get("date", "?")[:10], f"[{page}]({page})", f"`{command}`"))
        if not found:
            rows.append((theme, question, "a CUDA GPU is needed" if theme in NEEDS_GPU else "any", "*not run*", "", f"`{command}`"))
    text = (
        "# Results\n\nWritten by the benchmarks themselves; each page says device, versions, n, spread, baseline and date, and the JSON beside\n"
        "it holds the raw records. A benchmark without a row of figures has not been run: nothing here is estimated.\n\n"
        f"{markdown_table(COLUMNS_OF_INDEX, rows)}\n"
    )
    write_whole(folder / "README.md", text)
