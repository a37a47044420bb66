"""Kills public scripts at random under `flatout run --resume` and restarts them: do they resume exactly?

DIR holds ``set.json`` as for ``open_set.py``. The scripts run unedited, from a copy of DIR's folders.

A training starts from scratch. SIGKILL hits its whole process group at a random moment after its first
resumable checkpoint. The same command runs again; it reports the step at which it resumes, or exits with an
error that says why it cannot. It is killed again, up to --lives times. Then SIGTERM ends it, it resumes once
more, and SIGTERM ends it again. With --first, SIGTERM ends it first, late in the training; kills and SIGTERM
then alternate. Each of these ends that is followed by a restart gives one row:

    same      the newest checkpoint of the resumed run holds the weights that the script has at that step
              without interruption, bit for bit. Its output equals the script's output from that step on: the
              same lines, none missing, none twice, from the right place
    refused   it did not resume, and said why
    WRONG     weights or lines differ
    failed    neither could be determined

The reference is independent of flatout (``programs/rescue_site``): the same script, undisturbed and without
flatout, writes the SHA-256 of each weight and the length of its output after each step. Times are masked in
the output.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import rescue
from provenance import RESULTS, markdown_table, read_json, read_result, stamp, write_result
from rescue import END_S, TERMINAL, end, environment, judged, last_line, undisturbed, wait_for

from flatout.checkpoint.resume.value_log import BLOCK, HEADER, JournalPosition, read_journal

FIRST_SAVE_S, RESUME_POINT_S = 240.0, 420.0
REFUSED = 10  # exit code
FROM_SCRATCH = "flatout: rescue keeps "  # printed after the first step
GOES_ON = re.compile(
    r"flatout: resumed exactly after step (\d+)(?:, reached in ([\d.]+) s; training had taken ([\d.]+) s)?"
)
TIMES = re.compile(
    r"""
    (?: time | data ) \s+ [\d.]+ \s* \( \s* [\d.]+ \s* \)
  | \b (?: time | elapsed ) [:=\s]* [\d.]+ \s* (?: ms | s )?
  | ms/batch \s+ [\d.]+
  | mfu \s+ -?[\d.]+%
  | [\d.?]+ \s* (?: it/s | s/it )
  | \b (?: fps | time_elapsed | tokens_per_second \w* ) [\s|:]* [\d.]+
  | \d+:\d\d (?: :\d\d (?: ,\d+ )? )? (?: < (?: [\d:]+ | \? ) )?
  | \b (?: \d+ (?: ms | s | m | h | D ) )+ \b
  | \b [\d.]+ \s? (?: seconds | secs? | ms | s ) \b
  | [━╸╺]{2,}  # a progress bar; its length depends on the times next to it
""",
    re.VERBOSE | re.IGNORECASE,
)


# -- one training --------------------------------------------------------------------------------------------


class Training:
    """A script that starts from scratch in its folder and is then killed and restarted several times."""

    def __init__(
        self,
        script: dict[str, Any],
        folder: Path,
        place: Path,
        rng: random.Random,
        span_s: float,
        later_s: float,
        first_s: float,
    ) -> None:
        self.script, self.folder, self.place, self.rng = script, folder, place, rng
        self.span_s, self.later_s, self.first_s = span_s, later_s, first_s
        self.first_save_s = 0.0

    def saves(self) -> list[dict[str, Any]]:
        """Returns the manifests of all checkpoints, the newest last."""
        found = [read_json(path) for path in self.folder.glob(".flatout/*/rescue/step-*/manifest.json")]
        return sorted(
            (manifest for manifest in found if isinstance(manifest, dict)),
            key=lambda manifest: int(manifest["step"]),
        )

    def exact(self) -> list[int]:
        """Returns the steps of the checkpoints from which the training can resume."""
        return [manifest["step"] for manifest in self.saves() if manifest["metadata"].get("exact") == ""]

    def live(self, number: int, how: signal.Signals) -> dict[str, Any]:
        """Runs until the signal ``how`` ends it, some time after a resumable checkpoint exists."""
        out, err = self.place / f"{number}.out", self.place / f"{number}.err"
        words = [sys.executable, "-m", "flatout", "run", "--plan", "none", "--resume", *self.script["argv"]]
        life: dict[str, Any] = {"number": number, "how": how.name}
        began_s = time.monotonic()
        with open(out, "wb") as stdout, open(err, "wb") as stderr:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=environment(self.script),
                stdin=TERMINAL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                ready = (
                    (lambda: bool(self.exact()))
                    if number == 0
                    else lambda: GOES_ON.search(err.read_text(errors="replace")) is not None
                )
                from_scratch = lambda: bool(number) and FROM_SCRATCH in err.read_text(errors="replace")  # noqa: E731
                wait_for(
                    lambda: ready() or process.poll() is not None or from_scratch(),
                    FIRST_SAVE_S if number == 0 else RESUME_POINT_S,
                )
                ready_s = time.monotonic()
                life["ready_s"] = round(ready_s - began_s, 2)
                if number == 0:
                    self.first_save_s = ready_s - began_s
                if not ready():
                    silent = {"verdict": "WRONG", "why": "it started from scratch without a message"}
                    return {
                        **life,
                        **(silent if from_scratch() else self._why_not(number, process.poll(), err)),
                    }
                if number == 0 and self.first_s:  # late, so that every restart replays many steps
                    wait_for(
                        lambda: process.poll() is not None, self.rng.uniform(self.first_s / 2, self.first_s)
                    )
                elif self.rng.random() < 0.8:  # otherwise there are few steps to replay
                    known = max(self.exact())
                    wait_for(
                        lambda: process.poll() is not None or max(self.exact(), default=0) > known,
                        self.later_s,
                    )
                wait_for(lambda: process.poll() is not None, self.rng.uniform(0.0, self.span_s))
                life |= {
                    "by_itself": process.poll() is not None,
                    "said_bytes": out.stat().st_size,  # the reply to a signal is not training output
                    "going_s": round(time.monotonic() - ready_s, 2),
                }
                if how == signal.SIGKILL:
                    os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
                elif process.poll() is None:
                    process.send_signal(how)
                wait_for(lambda: process.poll() is not None, END_S)
                life["lived_s"] = round(time.monotonic() - ready_s, 2)
            finally:
                end(process)
        life["exit_code"] = process.returncode
        if number and (said := GOES_ON.search(err.read_text(errors="replace"))):
            life["resume_point"] = int(said[1])
        return {**life, **self._kept(number)}

    def _why_not(self, number: int, code: int | None, err: Path) -> dict[str, Any]:
        said = [
            line.removeprefix("flatout: ")
            for line in err.read_text(errors="replace").splitlines()
            if line.startswith("flatout: ")
        ]
        if code == REFUSED:
            return {
                "verdict": "refused",
                "why": next((line for line in said if "cannot resume exactly" in line), last_line(err)),
            }
        rejected = [line for line in said if "could not be resumed exactly" in line]
        if number == 0 and rejected:
            return {
                "verdict": "refused",
                "why": rejected[-1],
            }  # reported during training, so a kill would test nothing
        if code is not None:
            return {"verdict": "failed", "why": f"exit code {code}: {last_line(err)}"}
        if number:
            return {"verdict": "failed", "why": f"it did not resume within {RESUME_POINT_S:.0f} s"}
        unsound = [manifest["metadata"].get("exact") for manifest in self.saves()]
        return {
            "verdict": "failed",
            "why": f"no resumable checkpoint within {FIRST_SAVE_S:.0f} s"
            + (f": {unsound[-1]}" if unsound else ""),
        }

    def _kept(self, number: int) -> dict[str, Any]:
        """Reads the newest checkpoint and the journal."""
        to = self.place / f"{number}.kept"
        done = subprocess.run(
            [sys.executable, "-m", "flatout", "rescue", "--to", str(to)],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        if done.returncode:
            return {"kept": None, "not_kept": done.stderr.strip()[-300:]}
        name = re.search(r"(step-[\d-]+) is in ", done.stderr)[1]  # type: ignore[index]
        manifest = read_json(next(self.folder.glob(f".flatout/*/rescue/{name}/manifest.json")))
        step, inside, holds = manifest["step"], manifest["metadata"]["inside"], manifest["metadata"]["holds"]
        return {
            "kept": step,
            "inside": inside,
            "updated": manifest["metadata"]["updated"],
            "exact": manifest["metadata"].get("exact"),
            "weights": digests_of(to),
            "optimizers": sum(held["kind"] == "optimizers" for held in holds),
            "save_bytes": sum(file["bytes"] for file in manifest["files"].values()),
            **self._journal(),
        }

    def _journal(self) -> dict[str, Any]:
        journals = sorted(
            (path for path in self.folder.glob(".flatout/*/rescue/journal-*") if not path.suffix),
            key=lambda path: path.stat().st_mtime,
        )
        if not journals:
            return {}
        end, data = JournalPosition(len(HEADER), 0), journals[-1].read_bytes()
        while end.bytes + BLOCK.size <= len(data):
            length, digest = BLOCK.unpack_from(data, end.bytes)
            if end.bytes + BLOCK.size + length > len(data):
                break  # incomplete: still being written
            end = JournalPosition(end.bytes + BLOCK.size + length, digest)
        _, values = read_journal(journals[-1], end)
        marks = sum(type(value) is dict and set(value) == {"mark"} for value in values)
        return {"journal_bytes": end.bytes, "synchronisations": len(values) - marks, "journal_steps": marks}


def digests_of(folder: Path) -> list[str]:
    """Returns the digest of each tensor that `flatout rescue --to` wrote, as the reference computes it."""
    import torch

    sys.path.insert(0, str(rescue.SITE))
    from sitecustomize import digests
    from torch.utils import _pytree as pytree

    found: set[str] = set()
    for file in folder.glob("*.pt"):
        leaves = pytree.tree_leaves(torch.load(file, map_location="cpu", weights_only=True))
        found.update(digests(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
    shutil.rmtree(folder)
    return sorted(found)


# -- lines ---------------------------------------------------------------------------------------------------


def lines_of(text: str) -> list[str]:
    """Returns the lines without times and without terminal control characters."""
    masked = (
        " ".join(TIMES.sub("TIME", line.replace("\b", "")).split()) for line in re.split(r"[\r\n]", text)
    )
    return [line for line in masked if line]


def whole_lines(text: str) -> list[str]:
    """Returns only the complete lines; the last may still be in progress."""
    return lines_of(text[: max(text.rfind("\n"), text.rfind("\r")) + 1])


def lines_differ(text: str, all_text: str, between: tuple[int, int], cut: bool = False) -> str:
    """Returns why ``text``, printed after a resume point, differs from the reference; "" where it does not.

    ``cut``: the reference was stopped, so lines after its last one cannot be compared. ``between``: the range
    of bytes of ``all_text`` in which the script's own output continues.
    """
    found, known = whole_lines(text), lines_of(all_text)
    before, upto = (all_text.encode()[:place].decode(errors="replace") for place in between)
    first, last = len(whole_lines(before)), len(lines_of(upto))  # the rest of a started line may be empty
    best = (-1, first)
    for at in range(first, last + 1):
        same = 0
        for here, there in zip(found, known[at:], strict=False):
            if here != there and not (same == 0 and there.endswith(here)):  # a resume point within a line
                break
            same += 1
        if same == len(found) or (cut and same and at + same == len(known)):
            return ""
        best = max(best, (same, at))
    same, at = best
    there = known[at + same] if at + same < len(known) else "its end"
    return f"line {same + 1} after the resume point is {found[same][:120]!r}; expected {there[:120]!r}"


# -- a script ------------------------------------------------------------------------------------------------


def measure(
    script: dict[str, Any], home: Path, original: Path, options: argparse.Namespace
) -> dict[str, Any]:
    script = {**script, "env": {"OMP_NUM_THREADS": "1", **script.get("env", {}), "PYTHONUNBUFFERED": "1"}}
    folder, top, rng = (
        home / script["cwd"],
        Path(script["cwd"]).parts[0],
        random.Random(f"{options.seed} {script['name']}"),
    )
    trainings: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="again-") as text:
        later_s, first_s = options.later, options.first
        while kills_of(trainings) < options.kills:
            place = Path(text) / str(len(trainings))
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            as_it_was(home, original, top)
            training = Training(script, folder, place, rng, options.span, later_s, first_s)
            kills = min(options.lives, options.kills - kills_of(trainings))
            ends = [signal.SIGKILL] * kills + [signal.SIGTERM] * 2
            if options.first:  # SIGTERM saves a checkpoint of the current step
                ends = [signal.SIGTERM, *[signal.SIGKILL, signal.SIGTERM] * kills]
            lives: list[dict[str, Any]] = []
            trainings.append(lives)
            for number, how in enumerate(ends):
                lives.append(training.live(number, how))
                shown = {
                    name: lives[-1][name]
                    for name in ("resume_point", "ready_s", "kept", "verdict", "why")
                    if name in lives[-1]
                }
                print(
                    f"    {script['name']}, {len(trainings)}.{number}, {how.name}: {shown}",
                    file=sys.stderr,
                    flush=True,
                )
                lives[-1]["by_itself"] = lives[-1].get("by_itself") or (
                    "kept" in lives[-1] and "journal_bytes" not in lives[-1]
                )  # at its very end
                if "verdict" in lives[-1] or lives[-1]["by_itself"]:
                    break
            if (
                len(lives) == 1 and lives[0].get("by_itself") and max(later_s, first_s) > 1.0
            ):  # it finished before the kill
                later_s, first_s = later_s / 2, first_s / 2
                trainings.pop()
        kept = [life for lives in trainings for life in lives if life.get("kept")]
        optimizers = max((life["optimizers"] for life in kept), default=0)
        count = (max((life["kept"] for life in kept), default=0) + 2) * max(optimizers, 1)
        as_it_was(home, original, top)
        alone = (
            Alone(script, folder, Path(text), count, optimizers)
            if any("resume_point" in life for lives in trainings for life in lives)
            else None
        )
        rows = [
            row
            for number, lives in enumerate(trainings)
            for row in rows_of(lives, alone, Path(text) / str(number))
        ]
        if options.keep:
            shutil.copytree(text, options.keep / script["name"], dirs_exist_ok=True)
    return {"made": stamp(), "kills": rows}


def kills_of(trainings: list[list[dict[str, Any]]]) -> int:
    """Counts the kills; a training without any counts as one, so that the loop ends."""
    return sum(max(sum(life.get("how") == "SIGKILL" for life in lives), 1) for lives in trainings)


class Alone:
    """The undisturbed reference run of the script."""

    def __init__(
        self, script: dict[str, Any], folder: Path, place: Path, count: int, optimizers: int
    ) -> None:
        self.events, self.by_hand = max(optimizers, 1), not optimizers
        self.weights = undisturbed(script, folder, place, count, by_hand=self.by_hand)
        self.cut = len(self.weights) >= count
        self.text = (place / "trace.out").read_bytes().decode(errors="replace")
        at = place / "trace.at"
        self.places = [int(line) for line in at.read_text().split()] if at.is_file() else []

    def between(self, step: int) -> tuple[int, int]:
        """Returns the range of bytes within which its output continues after a step."""
        first, last = (step - 1 if self.by_hand else step) * self.events - 1, (step + 1) * self.events - 1
        return self.places[first] if 0 <= first < len(self.places) else 0, self.places[last] if last < len(
            self.places
        ) else len(self.text.encode())


def rows_of(lives: list[dict[str, Any]], alone: Alone | None, place: Path) -> Iterator[dict[str, Any]]:
    """Yields a row for each end that is followed by a restart."""
    first = lives[0]
    if len(lives) == 1:
        why = first.get("why", "it finished before it was killed")
        yield {"verdict": first.get("verdict", "failed"), "why": why, "first_save_s": first.get("ready_s")}
    for before, life in pairwise(lives):
        err = (place / f"{life['number']}.err").read_text(errors="replace")
        row: dict[str, Any] = {
            "after": before["how"],
            "first_save_s": first["ready_s"],
            "resume_point_s": life["ready_s"],
            **{
                name: before[name]
                for name in ("journal_bytes", "synchronisations", "journal_steps", "save_bytes")
                if name in before
            },
            **{
                name: life[name]
                for name in ("resume_point", "kept", "inside", "exit_code", "lived_s", "by_itself")
                if name in life
            },
            "said": [line for line in err.splitlines() if line.startswith("flatout: ")],
        }
        if "verdict" in life:
            yield {**row, "verdict": life["verdict"], "why": life["why"], "kept_before": before.get("kept")}
            continue
        assert alone is not None
        if life["kept"] is None:
            yield {**row, "verdict": "failed", "why": life["not_kept"]}
            continue
        about = judged(
            {"step": life["kept"], "updated": life["updated"]},
            alone.weights,
            set(life["weights"]),
            alone.events,
        )
        text = (place / f"{life['number']}.out").read_bytes()[: life["said_bytes"]].decode(errors="replace")
        lines = lines_differ(text, alone.text, alone.between(life["resume_point"]), alone.cut)
        verdict = "WRONG" if about["verdict"] == "differs" or lines else about["verdict"]
        yield {
            **row,
            "verdict": verdict,
            "why": lines or about["why"],
            "lines": len(whole_lines(text)),
            "first_line": (whole_lines(text) or [""])[0][:120],
        }


def as_it_was(home: Path, original: Path, top: str) -> None:
    """Restores a folder of DIR from the original, without what a training left in it."""
    shutil.rmtree(home / top, ignore_errors=True)
    shutil.copytree(original / top, home / top, symlinks=True)


def page(scripts: dict[str, Any]) -> str:
    every = [row for script in scripts.values() for row in script["kills"]]
    counts = {
        verdict: sum(row["verdict"] == verdict for row in every)
        for verdict in ("same", "refused", "WRONG", "failed")
    }
    summary = []
    for name, script in scripts.items():
        rows = script["kills"]
        went = [row for row in rows if "resume_point" in row]
        whys = sorted({row["why"] for row in rows if row["verdict"] != "same"})
        summary.append(
            (
                name,
                len(rows),
                *(sum(row["verdict"] == verdict for row in rows) for verdict in counts),
                f"{min(row['resume_point'] for row in went)}-{max(row['resume_point'] for row in went)}"
                if went
                else "-",
                f"{median(row['resume_point_s'] for row in went):.1f}" if went else "-",
                f"{median(row['first_save_s'] for row in went):.1f}" if went else "-",
                *pace(went),
                synchronisation(rows),
                versions_of(script),
                "; ".join(whys),
            )
        )
    kills = sum(row.get("after") == "SIGKILL" for row in every)
    parts = [
        "# Public scripts, killed at random and resumed\n",
        f"{kills} kills and {len(every) - kills} SIGTERMs, each followed by a restart: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}.\n",
        markdown_table(
            (
                "script",
                "ends",
                *counts,
                "resumed after step",
                "s to resume",
                "s from a fresh start to the first checkpoint",
                "original training, s",
                "replay, s",
                "replay speed-up",
                "journal, bytes an entry",
                "flatout",
                "why",
            ),
            summary,
        ),
        "\n## Each\n",
        markdown_table(
            (
                "script",
                "ended by",
                "verdict",
                "resumed after step",
                "s to resume",
                "next checkpoint",
                "lines compared",
                "why",
            ),
            [
                (
                    name,
                    row.get("after", "-"),
                    row["verdict"],
                    row.get("resume_point", "-"),
                    row.get("resume_point_s", "-"),
                    f"{row.get('kept', '-')}{', inside' if row.get('inside') else ''}",
                    row.get("lines", "-"),
                    row["why"],
                )
                for name, script in scripts.items()
                for row in script["kills"]
            ],
        ),
    ]
    return "\n".join(parts)


def pace(rows: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Returns original time, replay time and speed-up for the latest resume point.

    The replay time counts from the first batch, as flatout reports it.
    """
    said = [
        (float(found[3]), float(found[2]))
        for row in rows
        for line in row.get("said", ())
        if (found := GOES_ON.match(line)) and found[2]
    ]
    trained_s, through_s = max(said, default=(0.0, 0.0))
    return (
        (f"{trained_s:.1f}", f"{through_s:.1f}", f"{trained_s / max(through_s, 0.05):.1f}")
        if said
        else ("-", "-", "-")
    )


def versions_of(script: dict[str, Any]) -> str:
    """Returns the flatout versions of a script's runs. Runs accumulate; the page shows only its own date."""
    return (
        ", ".join(
            dict.fromkeys(
                made["versions"]["flatout"].partition(" ")[2].strip("()") for made in script["made"]
            )
        )
        or "-"
    )


def synchronisation(rows: list[dict[str, Any]]) -> str:
    """Returns the bytes an entry of the longest journal."""
    found = [(row["synchronisations"], row["journal_bytes"]) for row in rows if row.get("synchronisations")]
    return f"{max(found)[1] / max(found)[0]:.1f}" if found else "-"


def main() -> None:
    global FIRST_SAVE_S, RESUME_POINT_S
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that holds set.json")
    parser.add_argument(
        "--only", default="", help="run only these scripts, separated by commas, in this order"
    )
    parser.add_argument(
        "--kills", type=int, default=20, metavar="N", help="kills of each script (default 20)"
    )
    parser.add_argument(
        "--lives", type=int, default=4, metavar="N", help="most kills in one training (default 4)"
    )
    parser.add_argument(
        "--span",
        type=float,
        default=12.0,
        metavar="SECONDS",
        help="maximum run time after it becomes resumable (default 12)",
    )
    parser.add_argument(
        "--later",
        type=float,
        default=25.0,
        metavar="SECONDS",
        help="maximum wait of most kills for a newer checkpoint (default 25)",
    )
    parser.add_argument(
        "--first",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="send the first SIGTERM after half to all of this time, so that every resume is late; then alternate kills and SIGTERM",
    )
    parser.add_argument(
        "--more", action="store_true", help="add to the results of earlier runs instead of replacing them"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random kill times (default 0)")
    parser.add_argument(
        "--patience",
        type=float,
        default=FIRST_SAVE_S,
        metavar="SECONDS",
        help="timeout for the first resumable checkpoint (default 240)",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all output in this folder")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    FIRST_SAVE_S, RESUME_POINT_S = args.patience, max(RESUME_POINT_S, args.patience)
    rescue.TRACE_S = max(rescue.TRACE_S, 4 * args.patience)
    made = stamp()
    scripts: dict[str, Any] = dict(read_result("again", made, args.out).get("scripts", {}))
    given = {script["name"]: script for script in json.loads((args.folder / "set.json").read_text())}
    with tempfile.TemporaryDirectory(prefix="again-set-") as text:
        home = Path(text)
        for name in list(filter(None, args.only.split(","))) or given:
            found = measure(given[name], home, args.folder, args)
            for row in found["kills"]:
                went = f"resumed after step {row.get('resume_point')} in {row.get('resume_point_s')} s, then checkpoint {row.get('kept')}"
                print(f"  {name}, {row.get('after')}: {row['verdict']} ({row['why']}) {went}", flush=True)
            earlier = scripts.get(name, {"made": [], "kills": []}) if args.more else {"made": [], "kills": []}
            scripts[name] = {
                "made": [*earlier["made"], found["made"]],
                "kills": [*earlier["kills"], *found["kills"]],
            }
            in_order = {each: scripts[each] for each in given if each in scripts}
            write_result("again", made, page(in_order), {"scripts": in_order}, folder=args.out)


if __name__ == "__main__":
    main()
