"""One rank of bench/exchange.py: times gradient exchanges.

Arguments: a JSON file with the settings, and a folder; rank 0 writes result.json there. flatout's own local
launcher starts it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.distributed.data_parallel import DataParallelScript
from flatout.distributed.division import SplitSettings
from flatout.job.rank_environment import RankEnvironment, this_rank
from flatout.levers import TABLE
from flatout.measure.clock import HostClock

LEVERS = {lever.name: lever for lever in TABLE}
SETTLING = (
    4  # passes after a change: two in which no bucket leaves early and PowerSGD does not compress, two more
)
CLOCK = HostClock()


class Exposed(Listener):
    """The waiting time of each backward pass for its exchange, and the sent bytes."""

    def __init__(self) -> None:
        self.waits_ms: list[float] = []
        self.traffic: Any = None

    def exchange_begin(self) -> None:
        self.begun = CLOCK.mark()

    def exchange_end(self, traffic: Any) -> None:
        self.waits_ms.append(CLOCK.elapsed_ms(self.begun, CLOCK.mark()))
        self.traffic = traffic


def entered(here: RankEnvironment) -> tuple[TrainingContext, Exposed, Ledger]:
    """The state of a run with several ranks."""
    ledger, exposed = Ledger(), Exposed()
    context = TrainingContext(torch, exposed, ledger)
    divided = DataParallelScript(torch, context, here, SplitSettings(), ledger)
    divided.install()
    ledger.set(context, "data_parallel", divided)
    context.install()
    return context, exposed, ledger


def comparison(job: dict[str, Any], here: RankEnvironment) -> dict[str, Any]:
    """Runs rounds of A B B A for each pair of sides, in this pair of ranks.

    Returns the milliseconds of each pass, and of its waiting.
    """
    context, exposed, ledger = entered(here)
    torch.manual_seed(0)
    layers = [
        each for _ in range(job["layers"]) for each in (nn.Linear(job["width"], job["width"]), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.Linear(job["width"], 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(
        torch.randn(job["batch"], job["width"]), torch.randint(10, (job["batch"],))
    )
    loader = torch.utils.data.DataLoader(data, batch_size=job["batch"])

    def passes(number: int) -> tuple[list[float], list[float]]:
        times, from_wait = [], len(exposed.waits_ms)
        for _ in range(number):
            for x, y in loader:
                begun = CLOCK.mark()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                times.append(CLOCK.elapsed_ms(begun, CLOCK.mark()))
        return times, exposed.waits_ms[from_wait:]

    def stand(side: dict[str, Any]) -> Ledger:
        held = Ledger()
        if "way" in side:
            LEVERS["comm_compression"].apply(context, side["way"], held)
        if "mib" in side:
            LEVERS["gradient_buckets"].apply(context, side["mib"], held)
        passes(1)  # makes the exchange
        context.data_parallel.exchange.may_leave_early = side.get("early", True)
        passes(SETTLING)
        return held

    passes(SETTLING)
    found = []
    for pair in job["pairs"]:
        rounds, traffic = [], {}
        for _ in range(job["rounds"]):
            blocks: dict[str, list[Any]] = {"a": [], "b": []}
            held, now = Ledger(), ""
            for name in "abba":
                if name != now:
                    held.restore()
                    held, now = stand(pair[name]), name
                blocks[name].append(passes(job["block"]))
                traffic[name] = vars(exposed.traffic)
            held.restore()
            rounds.append(blocks)
        found.append({**pair, "rounds": rounds, "traffic": traffic})
    ledger.restore()
    return {"parameters": sum(p.numel() for p in model.parameters()), "pairs": found}


def main() -> None:
    here = this_rank()
    if here is None:
        raise SystemExit("this is a rank; bench/exchange.py starts it")
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    result = comparison(job, here)
    if here.rank == 0:
        (Path(sys.argv[2]) / "result.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # a group whose ranks end one after the other complains


if __name__ == "__main__":
    main()
