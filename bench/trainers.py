"""Runs small programs of trainer frameworks under flatout: is everything as without it, found, faster, resumed?

The programs are in ``bench/trainers``, one a framework. They use data that ships with the library or is
generated. A program whose framework is not installed is left out; the page says so. The parts, of which
--parts selects some:

    transparent   losses bit by bit, output and exit code, as ``open_set.py --transparent`` compares them
    profile       whether `flatout profile` finds the training loader and the optimizer
    tune          `flatout tune`, with its own budget or --budget, measured again as ``open_set.py`` does
    resume        kills at random and restarts under `flatout run --resume`, judged as ``again.py`` does

Results are kept for each program and part. Restarted in the same month, it skips finished parts and repeats
failed ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import again
import transparency
from open_set import PAIRS, measure_script
from open_set_page import again_of
from pairs import spell
from provenance import HERE, RESULTS, look, markdown_table, read_result, stamp, write_result

PROGRAMS = HERE / "trainers"
PACKAGES = {  # the program's framework, and what it trains with
    "huggingface": ("transformers", "accelerate"),
    "trl_sft": ("trl", "transformers", "datasets"),
    "peft_lora": ("peft", "transformers", "accelerate"),
    "lightning_digits": ("lightning",),
    "accelerate_digits": ("accelerate",),
    "fastai_digits": ("fastai",),
    "stable_baselines": ("stable-baselines3", "gymnasium"),
    "skorch_digits": ("skorch",),
    "ultralytics_cls": ("ultralytics",),
    "timm_loop": ("timm",),
    "monai_segmentation": ("monai", "pytorch-ignite"),
    "torchtune_full": ("torchtune", "torchao"),
}
PREPARED = (
    "ultralytics_cls",
    "torchtune_full",
)  # `prepare` writes their data; a training that is killed finds it
PARTS = ("transparent", "profile", "tune", "resume")
# Except for `tune`, which chooses the number of threads. `flatout trial` sets WANDB_MODE, and transformers prints it.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
RESUME = {"lives": 2, "span": 4.0, "later": 6.0, "first": 0.0, "seed": 0}


def versions_of(name: str) -> dict[str, str]:
    """Returns the versions of a program's packages; empty if one is missing."""
    try:
        return {package: version(package) for package in PACKAGES[name]}
    except PackageNotFoundError:
        return {}


def prepare(name: str, folder: Path) -> None:
    """Copies the programs into a folder, and writes the data of those that need it."""
    shutil.copytree(PROGRAMS, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    if name in PREPARED:
        subprocess.run([sys.executable, f"{name}.py", "prepare"], cwd=folder, check=True)


# -- parts ---------------------------------------------------------------------------------------------------


def transparent(script: dict[str, Any], home: Path, options: argparse.Namespace) -> dict[str, Any]:
    found = transparency.compare(
        script["argv"], home / script["cwd"], ENVIRONMENT, options.steps, options.limit
    )
    return {**found, "failed": found["verdict"] == "failed"}


def profile(script: dict[str, Any], home: Path, options: argparse.Namespace) -> dict[str, Any]:
    words = ["profile", "--json", "--steps", str(options.steps), "--budget", "20s", *script["argv"]]
    command, environment = [sys.executable, "-m", "flatout", *words], {**os.environ, **ENVIRONMENT}
    code, out, err = transparency.run_quietly(command, home / script["cwd"], environment, options.limit)
    if code is None:
        return {"failed": True, "why": f"it did not end within {options.limit:.0f} s"}
    try:
        record = json.loads(out)
    except json.JSONDecodeError:
        return {"failed": True, "why": err.strip()[-300:]}
    context = record["context"]
    at = context["training_loader"]
    return {
        "failed": record["status"] != "done",
        "why": record["message"],
        "loaders": context["loaders"],
        "training_loader": None if at is None else context["loaders"][at],
        "optimizers": context["optimizers"],
        "roots": context["roots"],
        "step_ms": record["step_ms"],
        "shares": {phase: round(times["share"], 3) for phase, times in record["phases"].items()},
    }


def tune(script: dict[str, Any], home: Path, options: argparse.Namespace) -> dict[str, Any]:
    found = measure_script(script, home, options.budget, look(), options.pairs, options.keep)
    return {**found, "failed": found["status"] == "failed"}


def resume(script: dict[str, Any], home: Path, options: argparse.Namespace) -> dict[str, Any]:
    asked = argparse.Namespace(**RESUME, kills=options.kills, keep=options.keep)
    found = again.measure({**script, "env": ENVIRONMENT}, home, home.with_name("original"), asked)
    return {**found, "failed": any(row["verdict"] == "failed" for row in found["kills"])}


MEASURES: dict[str, Callable[[dict[str, Any], Path, argparse.Namespace], dict[str, Any]]] = {
    "transparent": transparent,
    "profile": profile,
    "tune": tune,
    "resume": resume,
}


# -- the page ------------------------------------------------------------------------------------------------


def cell(part: str, entry: dict[str, Any]) -> str:
    """Returns a part's result in a few words."""
    found = entry.get(part)
    if found is None:
        return "-"
    if part == "transparent":
        output = f"; output: {found['output']}" if "output" in found else ""
        return f"{found['verdict']}: {found['why']}{output}"
    if part == "resume":
        verdicts = [row["verdict"] for row in found["kills"]]
        whys = sorted({row["why"] for row in found["kills"] if row["verdict"] != "same"})
        return "; ".join(
            [", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts)), *whys]
        )
    if found["failed"]:
        return f"failed: {found['why'].splitlines()[-1][:200] if found['why'] else 'no reason'}"
    if part == "tune":
        budget = "its own budget" if found["budget_s"] is None else f"{found['budget_s']:.0f} s"
        return f"{found['plan']}: {spell(again_of(found))} ({budget})"
    loader = found["training_loader"]
    of = "no loader" if loader is None else f"loader of batches of {loader['batch_size']}"
    return f"{of}; {', '.join(found['optimizers']) or 'no optimizer'}"


def mean_of(programs: dict[str, dict[str, Any]]) -> str:
    """Returns the geometric mean of the speed-ups, those of programs that stay plain included; "" without any."""
    tuned = (again_of(entry["tune"]) for entry in programs.values() if "tune" in entry)
    ratios = [ratio["median"] for ratio in tuned if ratio is not None]
    if not ratios:
        return ""
    return f"; geometric mean of {len(ratios)}: {geometric_mean(ratios):.2f}x"


def page(programs: dict[str, dict[str, Any]]) -> str:
    rows = [
        (
            f"[{name}](../trainers/{name}.py)",
            ", ".join(f"{package} {number}" for package, number in entry["versions"].items())
            or "not installed",
            *(cell(part, entry) for part in PARTS),
        )
        for name, entry in programs.items()
    ]
    return (
        "# Trainer frameworks\n\n"
        "transparent: losses, output and exit code compared with a run without flatout. profile: what the profile found.\n"
        "tune: the plan, and its speed-up measured again"
        f"{mean_of(programs)}. resume: ends by SIGKILL and SIGTERM, each followed by a restart.\n\n"
        f"{markdown_table(('program', 'versions', *PARTS), rows)}"
    )


# -- the command line ----------------------------------------------------------------------------------------


def choices(text: str, known: tuple[str, ...], parser: argparse.ArgumentParser) -> list[str]:
    chosen = [word for word in text.split(",") if word]
    if unknown := set(chosen) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return [each for each in known if not chosen or each in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only these programs, separated by commas")
    parser.add_argument("--parts", default="", help="only these parts, separated by commas")
    parser.add_argument("--steps", type=int, default=30, help="steps of transparent and profile (default 30)")
    parser.add_argument("--kills", type=int, default=2, help="kills of each program (default 2)")
    parser.add_argument("--budget", type=float, help="seconds of tune (default: what it chooses itself)")
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, help="sets of processes of tune's second measurement (default 3)"
    )
    parser.add_argument("--limit", type=float, default=400.0, help="longest run in seconds (default 400)")
    parser.add_argument("--again", action="store_true", help="measure again what is measured already")
    parser.add_argument("--keep", type=Path, help="keep records and output in this folder")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    names, parts = choices(args.only, tuple(PACKAGES), parser), choices(args.parts, PARTS, parser)
    made = stamp()
    programs: dict[str, dict[str, Any]] = dict(read_result("trainers", made, args.out).get("programs", {}))
    for name in names:
        entry = programs.setdefault(name, {})
        entry["versions"] = versions_of(name)
        for part in parts if entry["versions"] else ():
            if not args.again and part in entry and not entry[part]["failed"]:
                continue
            print(f"{name}, {part} ...", flush=True)
            with tempfile.TemporaryDirectory(prefix="trainers-") as text:
                home, original = Path(text) / "home", Path(text) / "original"
                prepare(name, original / PROGRAMS.name)
                shutil.copytree(original, home)
                script = {"name": name, "cwd": PROGRAMS.name, "argv": ["python", f"{name}.py"], "env": {}}
                entry[part] = {"made": stamp(), **MEASURES[part](script, home, args)}
            print(f"{name}, {part}: {cell(part, entry)}", flush=True)
            ordered = {each: programs[each] for each in PACKAGES if each in programs}
            write_result("trainers", made, page(ordered), {"programs": ordered}, folder=args.out)
    print(f"\n{page({each: programs[each] for each in PACKAGES if each in programs})}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
