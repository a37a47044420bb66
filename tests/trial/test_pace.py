"""The ranks of one program under a trial: they switch after the same step, are probed together, and one of
them may meanwhile compute by itself.
"""

import sys

import pytest

from flatout.job.folder import TrialFolder
from flatout.launch.command import understand
from flatout.launch.local_launcher import launcher_of
from flatout.measure.clock import seconds
from flatout.measure.rank_balance import imbalance, lost_ms, paces
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.trial.parent import Trial

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)

SLEEP_MS = 4.0  # a sample, on rank 1
PROGRAM = f"""
import gc, os, sys, time
import torch
rank = os.environ["FLATOUT_RANK"]
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 6000
    def __getitem__(self, index):
        if rank == "1":
            time.sleep({SLEEP_MS / 1000})
        return torch.full((5,), index / 6000.0)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = os.open(f"{{sys.argv[1]}}.{{rank}}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    for batch in torch.utils.data.DataLoader(Slow(), batch_size=6):
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        os.write(seen, f"{{gc.get_threshold()[0]}}:{{loss.item():.9f}} ".encode())
"""


def soon():
    return seconds() + 60


@pytest.mark.processes
def test_two_ranks_of_the_local_launcher(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "trial").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(
        tmp_path / "work"
    )  # what a program writes below its working folder goes to the file sandbox
    command = launcher_of(
        understand([sys.executable, str(tmp_path / "train.py"), str(tmp_path / "seen")]), 2, cores=2
    )
    base = Plan((Choice("data_parallel", {"reduction": "mean", "batches": "index", "loaders": "0"}),))
    with Trial(command, TrialFolder(tmp_path / "trial"), base, Facts()) as trial:
        ready = trial.wait_ready(soon() + 40)
        assert [each["name"] for each in ready["applied"]] == ["data_parallel"]
        trial.hold()

        # Both are probed over the same steps: a rank that waits for its data makes the other wait.
        answer = trial.listen("pace", soon(), everywhere=True, ticks=8)
        recorded = sorted(answer["ranks"], key=lambda rank: rank["rank"])
        assert [rank["rank"] for rank in recorded] == [0, 1]
        for rank in recorded:
            assert {len(rank[name]) for name in ("step_ms", "data_ms", "exchange_ms", "sent_bytes")} == {8}
            assert (rank["samples"], rank["elements"]) == ([3.0] * 8, [15.0] * 8)
            assert min(rank["sent_bytes"]) >= 4 * 57  # the number of parameters
        first, second = paces(recorded)
        assert second.data_ms >= 3 * SLEEP_MS > first.data_ms
        assert first.exchange_ms > second.exchange_ms
        assert lost_ms(recorded) > SLEEP_MS
        assert "rank 1 on " in imbalance(recorded)
        assert "it waits" in imbalance(recorded)

        # They switch after the same step, and continue together after one of them has repeated some steps by
        # itself.
        for choices in ([Choice("gc_pause", True)], [], [Choice("gc_pause", True)]):
            assert trial.switch(choices, soon())["skipped"] == []
            trial.go(3, soon())
        replica = trial.ask({"do": "replica", "choices": []}, soon())["replica"]
        assert all(check["passed"] for check in replica["checks"]), replica
        trial.go(5, soon())
        record = trial.finish()
    assert record.status == "finished"
    assert record.phases["exchange"]["median_ms"] > 0
    assert record.samples_per_step == 6.0
    info = [(tmp_path / f"seen.{rank}").read_text().split() for rank in (0, 1)]
    together = min(map(len, info))
    assert info[0][:together] == info[1][:together]
    assert len({word.partition(":")[0] for word in info[0]}) == 2


def row(rank, own, data=0.0, elements=10.0, steps=20):
    """A rank whose steps all take what the slowest takes; ``own`` and the rest may be a list with one value
    per step.
    """

    def each(value):
        return list(value) if isinstance(value, list) else [value] * steps

    return {
        "rank": rank,
        "host": f"node{rank}",
        "own": each(own),
        "data_ms": each(data),
        "elements": each(elements),
        "samples": each(4.0),
        "sent_bytes": each(8.0),
    }


def of(*rows):
    for at in range(len(rows[0]["own"])):
        length = max(each["own"][at] for each in rows) + 1.0
        for each in rows:
            each.setdefault("step_ms", []).append(length)
            each.setdefault("exchange_ms", []).append(length - each["own"][at])
    return list(rows)


def test_the_slowest_rank_and_the_reason():
    assert imbalance(of(row(0, 10.0), row(1, 10.1))) == ""
    slow = imbalance(of(row(0, 10.0), row(1, 10.0), row(2, 16.0)))
    assert "in 100% of the steps rank 2 on node2; its data is like that of the others" in slow
    assert "4.0 ms of a step of 17.0 ms" in slow
    assert "it has 1.50 times as much data as the mean" in imbalance(
        of(row(0, 10.0, elements=5.0), row(1, 20.0, elements=15.0))
    )
    assert "it waits 9.0 ms for its data, the others 0.0 ms" in imbalance(
        of(row(0, 10.0), row(1, 19.0, data=9.0))
    )
    turns = of(
        row(0, [10.0, 20.0] * 10, elements=[5.0, 15.0] * 10),
        row(1, [20.0, 10.0] * 10, elements=[15.0, 5.0] * 10),
    )
    assert "not always the same" in imbalance(turns)
    assert "1.50 times as much data" in imbalance(turns)
    assert lost_ms(turns) == pytest.approx(5.0)
