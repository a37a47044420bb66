"""The ranks of one program under a trial: they switch after the same step, and one of them may meanwhile
compute by itself.
"""

import sys

import pytest

from flatout.job.folder import TrialFolder
from flatout.launch.command import parse_command
from flatout.launch.local_launcher import launcher_of
from flatout.measure.clock import seconds
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.trial.parent import Trial

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import gc, os, sys
import torch
rank = os.environ["FLATOUT_RANK"]
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 6000
    def __getitem__(self, index):
        return torch.full((5,), index / 6000.0)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = os.open(f"{sys.argv[1]}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    for batch in torch.utils.data.DataLoader(Numbers(), batch_size=6):
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        os.write(seen, f"{gc.get_threshold()[0]}:{loss.item():.9f} ".encode())
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
        parse_command([sys.executable, str(tmp_path / "train.py"), str(tmp_path / "seen")]), 2, cores=2
    )
    base = Plan((Choice("data_parallel", {"reduction": "mean", "batches": "index", "loaders": "0"}),))
    with Trial(command, TrialFolder(tmp_path / "trial"), base, Facts()) as trial:
        ready = trial.wait_ready(soon() + 40)
        assert [each["name"] for each in ready["applied"]] == ["data_parallel"]
        trial.pause()

        # They switch after the same step, and continue together after one of them has repeated some steps by
        # itself.
        for choices in ([Choice("gc_pause", True)], [], [Choice("gc_pause", True)]):
            assert trial.switch(choices, soon())["skipped"] == []
            trial.run_ticks(3, soon())
        replica = trial.ask({"do": "replica", "choices": []}, soon())["replica"]
        assert all(check["passed"] for check in replica["checks"]), replica
        trial.run_ticks(5, soon())
        record = trial.finish()
    assert record.status == "finished"
    assert record.phases["exchange"]["median_ms"] > 0
    assert record.samples_per_step == 6.0
    info = [(tmp_path / f"seen.{rank}").read_text().split() for rank in (0, 1)]
    together = min(map(len, info))
    assert info[0][:together] == info[1][:together]
    assert len({word.partition(":")[0] for word in info[0]}) == 2
