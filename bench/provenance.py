"""Records the provenance of figures (device, versions, date) and writes the results of all benchmarks.

A benchmark measures its own checkout: importing this file puts ``src`` first on the path, for this process
and for the programs that it starts, unless flatout was imported before (by a test, from a wheel). Results are a Markdown page and a JSON file with the raw records, named
``<theme>_<device>_<yyyymm>``. Each write also regenerates ``results/README.md``. Paths of the machine are
removed from all of them.
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

if "flatout" not in sys.modules:
    sys.path.insert(0, str(SRC))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])
# `python` in a command is the Python that runs the benchmark.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

from flatout.job.folder import read_json, write_atomically  # noqa: E402
from flatout.measure.clock import utc_now  # noqa: E402
from flatout.probe.machine import look  # noqa: E402
from flatout.schema.facts import Facts  # noqa: E402
from flatout.tune.prior import device_kind  # noqa: E402

# theme, the command that makes it, what it measures
THEMES = (
    (
        "overhead",
        "python bench/overhead.py",
        "The cost of attaching flatout: microseconds a step, seconds at start-up",
    ),
    (
        "isolation",
        "python bench/isolation.py --against SRC",
        "What it costs a program that a trial keeps its files apart",
    ),
    (
        "transparent",
        "python bench/open_set.py DIR --transparent",
        "Whether attaching flatout changes anything: losses bit by bit, output, exit code",
    ),
    (
        "open_set",
        "python bench/open_set.py DIR --experts",
        "The speed-up from tuning public training scripts, measured again and compared with expert plans",
    ),
    (
        "time_to_accuracy",
        "python bench/time_to_accuracy.py DIR",
        "Complete trainings, plain and tuned: the final metric, and the time to reach a metric",
    ),
    (
        "coverage",
        "python bench/coverage.py",
        "How often the intervals of a plan's speed cover the truth, simulated and for a plan that does nothing",
    ),
    (
        "simulated_card",
        "python bench/simulated_card.py",
        "The search on a GPU, simulated: the share of the best plan's speed that it keeps",
    ),
    (
        "busy",
        "python bench/busy.py",
        "What `flatout tune` claims beside other programs, against the same plan on the quiet machine",
    ),
    (
        "same_training",
        "python bench/same_training.py",
        "Whether `flatout compare --same-training` is right on edits of a program, sound and harmful ones",
    ),
    (
        "verify",
        "python bench/verify.py --set DIR/set.json",
        "What `flatout verify` says of certificates of public scripts: intact, altered, and after an edit",
    ),
    (
        "compare",
        "python bench/compare.py",
        "Comparisons of programs with a known difference: gates, and how often the interval covers it",
    ),
    (
        "blame",
        "python bench/blame.py",
        "Whether `flatout compare --blame` names a planted slow-down first, and nothing between equal programs",
    ),
    (
        "compare_environments",
        "python bench/compare_environments.py DIR --python OLD,NEW --only NAMES",
        "Public scripts under two versions of torch: step time, start-up, memory, losses",
    ),
    (
        "trackers",
        "python bench/trackers.py",
        "The cost of sending a run's live figures to experiment trackers, slow and unreachable ones too",
    ),
    (
        "run_checks",
        "python bench/run_checks.py",
        "What the checks of `flatout run` cost in the first 200 steps, and afterwards",
    ),
    (
        "check_open_set",
        "python bench/check_open_set.py",
        "The findings of `flatout check` in public trainers, each judged by hand",
    ),
    (
        "reports",
        "DATA=DIR python bench/reports.py",
        "Whether `check` and `profile` name mistakes from public reports, in programs written without knowledge of the rules",
    ),
    (
        "data",
        "python bench/data.py",
        "The speed-up of the data path, by itself and in training, compared with a preloaded batch and other libraries",
    ),
    (
        "curves",
        "python bench/curves.py FOLDER",
        "Learning curves of a CIFAR-10 script with per-sample and batched transforms: three seeds each",
    ),
    (
        "regret",
        "python bench/regret.py",
        "How much slower the chosen plan is than the best plan of an exhaustive search",
    ),
    (
        "search_simulator",
        "python bench/search_simulator.py",
        "The quality of the plans that each search strategy finds in a given time, on simulated programs",
    ),
    (
        "search_sessions",
        "python bench/search_sessions.py",
        "Whole searches on simulated processes with cold starts: the plan that is kept, intervals, a recorded session",
    ),
    (
        "batch",
        "python bench/batch.py",
        "How much slower the recommended batch size is than the best of a sweep; accumulation, computed and measured",
    ),
    (
        "memory_prediction",
        "python bench/memory_prediction.py [DIR]",
        "A step's peak memory, predicted without computing, compared with the allocator's events",
    ),
    (
        "what_ifs",
        "python bench/what_ifs.py",
        "The what-if bounds of a profile, compared with the measured speed-up from removing each bottleneck",
    ),
    ("pythons", "make pythons", "Ten commands of the wheel under each Python of this machine"),
    ("torches", "make torches", "Ten commands of the wheel beside each supported torch"),
    (
        "zoo",
        "python bench/zoo.py",
        "Whether diagnosis reports a planted fault first, with its line; false alarms on the fixed versions",
    ),
    (
        "scaling",
        "python bench/scaling.py --here",
        "Step times on many devices predicted by `flatout scale`, compared with published runs and local ranks",
    ),
    (
        "loop",
        "python bench/loop.py",
        "The overhead of a training loop library: `flatout.Loop` and others, compared with the raw loop",
    ),
    (
        "loop_faults",
        "python bench/loop_faults.py",
        "Recovery of `flatout.Loop` from out-of-memory errors injected at hundreds of places, on one and two ranks",
    ),
    (
        "faults",
        "python bench/faults.py",
        "Checkpoints interrupted at every point, hit by power loss or damaged: wrong choices; silent errors of torch.load",
    ),
    (
        "fuzz",
        "python bench/fuzz.py --minutes 60",
        "Hostile and mutated input files for every parser: code executed, time, memory, error messages",
    ),
    (
        "resume",
        "python bench/resume.py --stall 120",
        "Trainings with the Loop, killed at random until done: bitwise equality, lost steps, cost of checkpoints",
    ),
    (
        "distributed",
        "python bench/distributed.py DIR",
        "Public single-process scripts on several ranks: parallelised or rejected, and their losses",
    ),
    (
        "exchange",
        "python bench/exchange.py",
        "Traffic between ranks: bytes and waiting time by codec and bucket size, and the loss with fewer exchanges",
    ),
    (
        "rescue",
        "python bench/rescue.py DIR",
        "Public scripts killed under `run --rescue`: whether the checkpoint is correct, bit for bit; its cost",
    ),
    (
        "again",
        "python bench/again.py DIR",
        "Public scripts killed at random under `run --resume`: whether they resume exactly, weights and output; how fast",
    ),
    (
        "again_cost",
        "python bench/again_cost.py",
        "The cost of the journal of exact resume a step, absolute and as a share of the steps of public scripts",
    ),
    (
        "again_pace",
        "python bench/again_pace.py",
        "How fast exact resume replays the steps of a small model, and whether the training continues the same",
    ),
    (
        "traps",
        "python bench/traps.py",
        "Small programs that are hard to resume exactly, killed and restarted: the undisturbed result, or a clear error",
    ),
    (
        "again_checks",
        "python bench/again_checks.py",
        "Each check of exact resume, disabled: which rejected program then resumes wrongly",
    ),
    (
        "trainers",
        "python bench/trainers.py",
        "Programs of trainer frameworks: losses bit by bit, what a profile finds, speed-up, exact resume",
    ),
    (
        "rivals",
        "python bench/rivals.py DIR",
        "Other tools on public scripts, as their own documentation says, and flatout: speed, losses, lines edited",
    ),
    (
        "two_hosts",
        "python bench/two_hosts.py",
        "A training over two hosts with link cuts and kills: continues, restarts or ends, and never hangs",
    ),
    (
        "launcher",
        "python bench/launcher.py",
        "Processes that outlive a killed launcher of several ranks; whether the first failed rank is identified",
    ),
    (
        "supervise",
        "python bench/supervise.py --faults 60 --alarms 6 --kills 100 --sigterm 100 --overhead 60",
        "Programs that hang, crash and receive SIGTERM under `--supervise`: time to detection, false alarms, orphans, cost",
    ),
    ("guard", "python bench/guard.py", "False accepts and false rejects of the guard"),
    ("mutants", "python bench/mutants.py", "Deliberate breaks of the source: which ones turn a test red"),
    (
        "explain",
        "python bench/explain.py",
        "Explanations of provoked failures, live and from their text, with tested fixes; recorded GPU failures",
    ),
    (
        "kernels",
        "python bench/kernels.py",
        "Each kernel compared with its reference, torch.compile and a copy on the same device",
    ),
    (
        "runs_gpu",
        "python bench/gpu/runs.py",
        "Whether flatout works on a GPU: programs plain, attached, under levers, interrupted, profiled, tuned",
    ),
    (
        "kernels_gpu",
        "python bench/gpu/kernels.py",
        "layer_norm on a GPU, compared with torch and Liger-Kernel",
    ),
    (
        "memory",
        "python bench/memory.py",
        "Memory savings and their cost: activation recomputation, accumulation in the Loop",
    ),
    (
        "memory_gpu",
        "python bench/gpu/memory.py",
        "A 124M GPT: trade-off of recompute and batch size, real out-of-memory errors, the batch finder and a sweep",
    ),
    (
        "ranks_gpu",
        "python bench/gpu/ranks.py",
        "Several ranks on one GPU, compared with one process: gradients, losses, memory, with and without sharding",
    ),
    ("again_gpu", "python bench/gpu/again.py", "Exact resume on a GPU: plain scripts, killed and resumed"),
    (
        "trust_gpu",
        "python bench/gpu/trust.py",
        "Checkpoints on a GPU: trainings killed and resumed, their cost, a program that runs out of memory",
    ),
    (
        "diagnosis_gpu",
        "python bench/gpu/diagnosis.py",
        "A GPU profile, compared with torch events, sync debug mode and Nsight Compute; leaks; out of memory",
    ),
    (
        "speed_gpu",
        "python bench/gpu/speed.py",
        "Six programs on a GPU: plain, common one-line optimisations, tuned by flatout, all levers",
    ),
)
NEEDS_GPU = {
    "runs_gpu",
    "kernels_gpu",
    "memory_gpu",
    "ranks_gpu",
    "again_gpu",
    "trust_gpu",
    "diagnosis_gpu",
    "speed_gpu",
}
COLUMNS_OF_INDEX = ("theme", "what it measures", "device", "date", "page", "made by")


def stamp(facts: Facts | None = None) -> dict[str, Any]:
    """Returns device, versions, date, command and the load average when the benchmark starts."""
    facts = facts or look()
    gpus = [gpu.name for gpu in facts.gpus]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    from flatout import __version__

    return {
        "device": f"{', '.join(gpus) + ', ' if gpus else ''}{facts.cpu}, {facts.cores} cores, {facts.memory_bytes / 2**30:.0f} GiB",
        "slug": _slug(gpus[0]) if gpus else device_kind(facts).replace(" with ", "_"),
        "versions": {"python": facts.python, **facts.versions, "flatout": f"{__version__}{_commit()}"},
        "date": utc_now(),
        "load_at_start": None if load is None else round(load, 2),
        "command": " ".join(["python", _of_repository(sys.argv[0]), *sys.argv[1:]]),
    }


def _slug(gpu: str) -> str:
    words = [
        word
        for word in gpu.lower().replace("-", " ").split()
        if word not in ("nvidia", "amd", "tesla", "geforce")
    ]
    return (
        "".join(
            c for c in "_".join(words[:2] if words[:1] == ["rtx"] else words[:1]) if c.isalnum() or c == "_"
        )
        or "gpu"
    )


def _commit() -> str:
    """Returns the commit in brackets, with a + for modified files; empty without git."""
    try:
        short = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "src"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
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
    busy = (
        "" if made.get("load_at_start") is None else f" Load average at the start: {made['load_at_start']}."
    )
    return f"Device: {made['device']}.  \nVersions: {versions}.  \nDate: {made['date']}.{busy}  \nCommand: `{made['command']}`"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table. Cells are plain text; a bar inside a cell becomes a slash."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += [
        "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in row) + " |"
        for row in rows
    ]
    return "\n".join(lines)


def result_paths(theme: str, made: Mapping[str, Any], folder: Path = RESULTS) -> tuple[Path, Path]:
    name = f"{theme}_{made['slug']}_{made['date'][:7].replace('-', '')}"
    return folder / f"{name}.md", folder / f"{name}.json"


def write_result(
    theme: str,
    made: Mapping[str, Any],
    page: str,
    raw: Mapping[str, Any],
    hidden: Mapping[str, str] | None = None,
    folder: Path = RESULTS,
) -> tuple[Path, Path]:
    """Writes the page and the raw records. ``hidden`` adds paths to those that are replaced by a word."""
    if theme not in {each for each, _, _ in THEMES}:
        raise ValueError(f"{theme} is missing in THEMES, so the index would not list its page; add it there")
    names = _hidden({**(hidden or {})})
    text, data = result_paths(theme, made, folder)
    write_atomically(data, dense(_without({"theme": theme, "made": made, **raw}, names)))
    write_atomically(text, str(_without(f"{page.rstrip()}\n\n{provenance_lines(made)}\n", names)))
    if folder == RESULTS:
        write_index()
    return text, data


def dense(record: Any) -> str:
    """Returns JSON with a line for each item, and one line for each list of numbers."""
    return (
        re.sub(
            r"\[[\s\d.eE,+-]+\]",
            lambda numbers: " ".join(numbers[0].split()).replace("[ ", "[").replace(" ]", "]"),
            json.dumps(record, indent=1),
        )
        + "\n"
    )


def some_or_all(doc: str | None, what: str) -> argparse.Namespace:
    """Parses the command line of a benchmark with many entries.

    ``only``: names of entries to measure again; empty for all. ``out``: a folder.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        default="",
        help=f"measure only these {what}, separated by commas; keep the rows of the others",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    asked = parser.parse_args()
    asked.only = set(filter(None, asked.only.split(",")))
    return asked


def read_result(theme: str, made: Mapping[str, Any], folder: Path = RESULTS) -> dict[str, Any]:
    """Returns the result of an earlier run of this month; empty if there is none."""
    data = read_json(result_paths(theme, made, folder)[1])
    return data if isinstance(data, dict) else {}


def _hidden(extra: dict[str, str]) -> dict[str, str]:
    given = {word: "DIR" for word in sys.argv[1:] if Path(word).is_absolute()}
    known = {
        **given,
        **extra,
        str(ROOT): ".",
        sys.prefix: "ENVIRONMENT",
        tempfile.gettempdir(): "TMP",
        str(Path.home()): "~",
    }
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
    """Writes ``README.md`` of the results: a row for each page, and one for each benchmark without a page."""
    rows = []
    for theme, command, question in THEMES:
        records = {
            path: read_json(path) or {} for path in sorted(folder.glob(f"{theme}_*.json"), reverse=True)
        }
        # The name of one theme may be a prefix of another.
        found = {path: data.get("made", {}) for path, data in records.items() if data.get("theme") == theme}
        for path, made in found.items():
            page = path.with_suffix(".md").name
            rows.append(
                (
                    theme,
                    question,
                    made.get("device", "?"),
                    made.get("date", "?")[:10],
                    f"[{page}]({page})",
                    f"`{command}`",
                )
            )
        if not found:
            rows.append(
                (
                    theme,
                    question,
                    "needs a CUDA GPU" if theme in NEEDS_GPU else "any",
                    "*not run*",
                    "",
                    f"`{command}`",
                )
            )
    text = (
        "# Results\n\nThe benchmarks write these pages. Each page states device, versions, n, spread, baseline and date; the JSON file\n"
        "next to it holds the raw records. A benchmark without figures has not been run: no figure is an estimate.\n\n"
        f"{markdown_table(COLUMNS_OF_INDEX, rows)}\n"
    )
    write_atomically(folder / "README.md", text)
