"""Kills trainings with `flatout.Loop` until they are done, and compares them with the undisturbed training.

A seed determines each training: loader workers 0, 2 or 4, forked or spawned, persistent or not, shuffled,
augmented from torch, random, numpy and a generator of the data set, accumulated, one or two ranks (gloo),
optimizer, clipping, the checkpoint interval. SIGKILL hits its process, with its loader workers, at a random
moment, and the same call starts it again, unattended, until it ends by itself. Then the SHA-256 of weights,
buffers, optimizer, scheduler, an average of the weights and all random states, for each rank, must equal that
of the undisturbed run.

    kills         processes that were killed before their end
    lost steps    steps that were complete before a kill and had to be repeated. With an interval of n, at
                  most 2 n: the last checkpoint may be unfinished
    unrecovered   trainings that did not finish: an error, a hang, a rejected checkpoint

--stall measures the cost of checkpoints (--kills 0 keeps the existing trainings). One process runs rounds of
four blocks of steps: without checkpoints, with checkpoints at the interval that the Loop chooses, with,
without. It also reads the Saver's own statistics. A checkpoint that is still being written at the end of a
block belongs to that block.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from overhead import interval, spell
from provenance import HERE, RESULTS, markdown_table, read_result, stamp, write_result

sys.path.insert(0, str(HERE / "programs"))

TIMEOUT_S = 90.0  # of one start
LONGEST_LIFE_S = 0.9
MOST_LIVES = 60  # of one training
GOAL = 1000
STATES = (
    ("small", 64, 2, 64),
    ("60 MB", 1300, 3, 64),
    ("60 MB, large steps", 1300, 3, 512),
)  # width, layers, batch


class Life:
    """The processes of one start of a training, one for each rank, each in a separate session."""

    def __init__(self, setting: Any, folder: Path, scratch: Path) -> None:
        from resuming import Told

        self.setting, self.metadata = setting, Told(setting.ranks)
        self.out = [Path(tempfile.mkstemp(dir=scratch)[1]) for _ in range(setting.ranks)]
        store = tempfile.mktemp(dir=scratch)
        self.left = {}
        for rank in range(setting.ranks):
            pid = os.fork()
            if pid == 0:
                self._live(folder, store, rank)
            self.left[pid] = rank
        self.pids = list(self.left)
        self.codes: dict[int, int] = {}

    def _live(self, folder: Path, store: str, rank: int) -> None:
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            silent = os.open(os.devnull, os.O_RDWR)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            from resuming import live

            self.out[rank].write_text(live(self.setting, folder, store, rank, self.metadata))
            code = 0
        except BaseException:
            self.out[rank].write_text("error " + traceback.format_exc()[-1500:])
        finally:
            os._exit(code)

    def wait(self, until_s: float) -> bool:
        """Returns whether all ranks end by themselves before that time."""
        while self.left:
            for pid in list(self.left):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[self.left.pop(pid)] = os.waitstatus_to_exitcode(status)
            if self.left and time.monotonic() > until_s:
                return False
            time.sleep(0.002)
        return True

    def kill(self, draw: random.Random) -> None:
        """Kills one rank, then the remaining ranks, and the loader workers of both."""
        order = draw.sample(self.pids, len(self.pids))
        for pid in order:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            time.sleep(draw.random() * 0.02 if len(order) > 1 else 0.0)
        for pid in self.pids:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for pid in list(self.left):
            os.waitpid(pid, 0)
        self.left = {}

    def end(self) -> None:
        for path in self.out:
            path.unlink(missing_ok=True)


def undisturbed(setting: Any, scratch: Path) -> tuple[list[str], float, str]:
    """Returns the digests of the ranks, the seconds, and the failure."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    began = time.monotonic()
    life = Life(setting, folder, scratch)
    done = life.wait(began + TIMEOUT_S)
    if not done:
        life.kill(random.Random(0))
    said = [path.read_text() for path in life.out]
    life.end()
    shutil.rmtree(folder, ignore_errors=True)
    wrong = "it hangs" if not done else next((each for each in said if each.startswith("error")), "")
    return said, time.monotonic() - began, wrong


def training(setting: Any, scratch: Path, most: int = MOST_LIVES) -> dict[str, Any]:
    """Runs one training and kills it until it is done, or until the limit of starts."""
    draw = random.Random(f"kills {setting.seed}")
    expected, whole_s, wrong = undisturbed(setting, scratch)
    folder = Path(tempfile.mkdtemp(dir=scratch))
    kills, lost, longest = (
        0,
        [],
        min(LONGEST_LIFE_S if setting.start == "fork" else 12.0, 0.8 * whole_s),
    )  # early enough to kill the first start
    before: int | None = None
    while not wrong:
        life = Life(setting, folder, scratch)
        last = kills >= most
        ended = life.wait(time.monotonic() + (TIMEOUT_S if last else draw.uniform(0.0, longest)))
        if not ended:
            life.kill(draw)
        resumed = life.metadata.get(0, 1)
        if life.metadata.get(0, 0) or ended:  # it trained, so its first step is known
            if before is not None:
                lost.append(before - max(resumed, 0))
            before = max(life.metadata.get(rank, 0) for rank in range(setting.ranks)) or before
        said = [path.read_text() for path in life.out]
        life.end()
        if ended:
            wrong = next((each for each in said if each.startswith("error")), "") or (
                f"exit codes {life.codes}" if any(life.codes.values()) else ""
            )
            wrong = wrong or ("" if said == expected else "other bits")
            break
        if last:
            wrong = "it hangs"
            break
        kills += 1
        longest *= 1.05  # ensures progress whatever a start costs
    shutil.rmtree(folder, ignore_errors=True)
    return {**setting.to_json(), "kills": kills, "lost": lost, "whole_s": round(whole_s, 2), "wrong": wrong}


def campaign(
    number: int, seeds: Iterator[int], kills: int, spawn_every: int, out: Path, scratch: Path
) -> None:
    """Runs in a separate process until its share of kills is done. Writes a JSON line for each training."""
    from resuming import drawn

    done = 0
    with out.open("w") as file:
        for at, seed in enumerate(seeds):
            if done >= kills:
                return
            record = training(drawn(seed, at % spawn_every == spawn_every - 1), scratch)
            done += record["kills"]
            print(json.dumps(record), file=file, flush=True)
            print(
                f"[{number}] {done} of {kills} kills, seed {seed}: {record['wrong'][-300:] or 'the same bits'}",
                flush=True,
            )


def warm() -> None:
    """Imports all modules of a training before the fork; starts no threads."""
    import resuming
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 2)
    for name in resuming.OPTIMIZERS:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        getattr(torch.optim, name)(model.parameters(), lr=0.1).step()
    import safetensors.torch  # noqa: F401

    import flatout.loop.loop  # noqa: F401


def summary(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    def row(name: str, chosen: list[dict[str, Any]]) -> tuple[Any, ...]:
        lost = [each for record in chosen for each in record["lost"]]
        wrong = sum(bool(record["wrong"]) for record in chosen)
        return (
            name,
            len(chosen),
            sum(record["kills"] for record in chosen),
            max(lost, default=0),
            median(lost) if lost else 0,
            sum(record["wrong"] == "other bits" for record in chosen),
            wrong,
        )

    ways = {
        "all": lambda r: True,
        "no loader workers": lambda r: r["workers"] == 0,
        "2 workers": lambda r: r["workers"] == 2 and r["start"] == "fork",
        "4 workers": lambda r: r["workers"] == 4,
        "spawned workers": lambda r: r["start"] == "spawn",
        "persistent workers": lambda r: r["persistent"] and r["workers"],
        "augmented": lambda r: r["augment"],
        "accumulated": lambda r: r["accumulate"] > 1,
        "2 ranks": lambda r: r["ranks"] == 2,
        "every step": lambda r: r["every"] == 1,
        "every 4 steps": lambda r: r["every"] == 4,
        "every 16 steps": lambda r: r["every"] == 16,
        "chosen interval": lambda r: r["every"] == 0,
    }
    return [row(name, [record for record in found if way(record)]) for name, way in ways.items()]


def stall(seconds_each: float, scratch: Path) -> list[dict[str, Any]]:
    """Returns rounds for each size: ms a step without checkpoints, with, with, without, in one process."""
    import torch

    import flatout

    found = []
    for name, width, layers, batch in STATES:
        loops = {}
        for side in ("plain", "saves"):
            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            batches = [torch.randn(batch, width)] * 10**6
            more: dict[str, Any] = {"checkpoint_dir": scratch / f"stall {name}"} if side == "saves" else {}
            loops[side] = flatout.Loop(model, optimizer, lambda m, b: m(b).square().mean(), batches, **more)  # type: ignore[operator]
        steps = {side: iter(loop) for side, loop in loops.items()}
        saver = loops["saves"]._saving.saver

        def block(side: str, length_s: float, steps: Any = steps, saver: Any = saver) -> float:
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < length_s:
                next(steps[side])
                count += 1
            if side == "saves":
                saver.wait()
            return 1e3 * (time.perf_counter() - began) / count

        for side in loops:
            block(side, 2.0)
        waited_s, worked_s, saves = saver.cost.waited_s, saver.cost.worked_s, saver.cost.checkpoints
        length_s, began = (
            max(2.0, 2.5 * saver.cost.last_s / saver.share),
            time.monotonic(),
        )  # at least two checkpoints in each block
        rounds = []
        while time.monotonic() - began < seconds_each or len(rounds) < 3:
            rounds.append([block(side, length_s) for side in ("plain", "saves", "saves", "plain")])
        size = (
            sum(stored.bytes for stored in saver.last.manifest.files.values())
            if saver.last is not None
            else 0
        )
        found.append(
            {
                "state": name,
                "bytes": size,
                "saves": saver.cost.checkpoints - saves,
                "block_s": length_s,
                "rounds": rounds,
                "seconds": 2 * len(rounds) * length_s,
                "waited_s": saver.cost.waited_s - waited_s,
                "worked_s": saver.cost.worked_s - worked_s,
            }
        )
        for iterator in steps.values():
            iterator.close()
    return found


def stall_page(found: list[dict[str, Any]]) -> str:
    rows = []
    for each in found:
        shares = [(b + c) / (a + d) - 1 for a, b, c, d in each["rounds"]]
        same = [d / a - 1 for a, _, _, d in each["rounds"]]
        rows.append(
            (
                each["state"],
                f"{each['bytes']:,}",
                each["saves"],
                f"{each['block_s']:.1f}",
                len(each["rounds"]),
                f"{median((a + d) / 2 for a, _, _, d in each['rounds']):.3f} ms",
                f"{spell(interval([[100 * x for x in shares]]), 2)} %",
                f"{spell(interval([[100 * x for x in same]]), 2)} %",
                f"{each['waited_s'] / each['seconds']:.2%}",
                f"{(each['waited_s'] + each['worked_s']) / each['seconds']:.2%}",
            )
        )
    return (
        "\n## The cost of checkpoints\n\n"
        + markdown_table(
            (
                "state",
                "bytes of a checkpoint",
                "checkpoints",
                "block, s",
                "rounds",
                "plain step",
                "with checkpoints",
                "A/A",
                "waiting (statistics)",
                "waiting and writing",
            ),
            rows,
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=GOAL)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first training; the others use the next ones"
    )
    parser.add_argument("--at-once", type=int, default=2, help="trainings that run at once")
    parser.add_argument(
        "--spawn-every", type=int, default=12, help="let one training in this many spawn its loader workers"
    )
    parser.add_argument(
        "--stall",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="measure the cost of checkpoints, for this long at each size",
    )
    parser.add_argument(
        "--more", action="store_true", help="add to the existing trainings instead of starting from scratch"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    made, began = stamp(), time.monotonic()
    before = read_result("resume", made, args.out)
    warm()
    with tempfile.TemporaryDirectory() as scratch:
        stalls = stall(args.stall, Path(scratch)) if args.stall else before.get("stall", [])
        children = []
        for number in range(args.at_once):
            out = Path(scratch) / f"campaign{number}"
            seeds = iter(range(args.seed + number, 10**9, args.at_once))
            pid = os.fork()
            if pid == 0:
                try:
                    campaign(
                        number, seeds, -(-args.kills // args.at_once), args.spawn_every, out, Path(scratch)
                    )
                finally:
                    os._exit(0)
            children.append((pid, out))
        for pid, _ in children:
            os.waitpid(pid, 0)
        found = [json.loads(line) for _, out in children for line in out.read_text().splitlines()]
    campaigns = (
        [
            {
                "minutes": (time.monotonic() - began) / 60,
                "date": made["date"],
                "version": made["versions"]["flatout"],
            }
        ]
        if found
        else []
    )
    if args.more or not args.kills:
        new = {record["seed"] for record in found}
        found = [record for record in before.get("trainings", []) if record["seed"] not in new] + found
        campaigns = before.get("campaigns", []) + campaigns
    rows = summary(found)
    kills, wrong = rows[0][2], rows[0][6]
    late = [
        record["seed"]
        for record in found
        if record["every"] and any(lost > 2 * record["every"] for lost in record["lost"])
    ]
    at_once = [lost for record in found if record["every"] == 1 for lost in record["lost"]]
    minutes = sum(each["minutes"] for each in campaigns)
    said = (
        f"{kills} kills of {len(found)} trainings in {minutes:.0f} minutes: **{wrong} not recovered bit for bit**; "
        f"with a checkpoint every step at most {max(at_once, default=0)} steps lost; more than twice the interval: {late or 'none'}. "
        f"Goal: {GOAL} kills, none wrong: {'reached' if kills >= GOAL and not wrong and not late else '**missed**'}. "
        + " ".join(f"Measured on {each['date']} with flatout {each['version']}." for each in campaigns)
    )
    text = (
        f"# Killed at random, resumed exactly\n\n{(__doc__ or '').strip()}\n\n{said}\n\n"
        + markdown_table(
            (
                "trainings",
                "n",
                "kills",
                "lost steps, maximum",
                "median",
                "other bits",
                "unrecovered in total",
            ),
            rows,
        )
        + "\n"
    )
    if stalls:
        text += stall_page(stalls)
    if wrong:
        text += (
            "\n## Wrong\n\n"
            + markdown_table(
                ("seed", "why"),
                [(record["seed"], record["wrong"][-400:]) for record in found if record["wrong"]],
            )
            + "\n"
        )
    print(text)
    print(
        *(
            path.name
            for path in write_result(
                "resume",
                made,
                text,
                {"trainings": found, "campaigns": campaigns, "stall": stalls},
                folder=args.out,
            )
        )
    )


if __name__ == "__main__":
    main()
