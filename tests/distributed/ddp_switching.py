"""Runs ddp_training.py as a search does: levers are switched in a trial, in all ranks after the same step.

Prints the results as JSON.

    ddp_switching.py OUT cpu|cuda
"""

import json
import os
import sys
from pathlib import Path

from flatout.job.folder import TrialFolder
from flatout.launch.command import understand
from flatout.measure.clock import seconds
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.trial.parent import Trial

ANSWER_S = 60.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

folder, device = Path(sys.argv[1]).resolve(), sys.argv[2]
for name in ("trial", "work"):
    (folder / name).mkdir()
os.chdir(folder / "work")  # what a program writes below its working folder goes to the file sandbox
found, skipped = {}, []
command = understand(
    [
        sys.executable,
        *TORCHRUN,
        str(Path(__file__).with_name("ddp_training.py").resolve()),
        str(folder),
        "-1",
        device,
    ]
)
with Trial(command, TrialFolder(folder / "trial"), Plan(), Facts()) as trial:
    found["device"] = trial.wait_ready(seconds() + ANSWER_S)["device"]
    trial.hold()
    options = trial.ask({"do": "options"}, seconds() + ANSWER_S)["options"]
    found["options"] = {name: options[name] for name in ("ddp_flags", "comm_compression")}
    exact, bf16, merged = (
        Choice("ddp_flags", options["ddp_flags"]["values"][0]),
        Choice("comm_compression", "bf16"),
        Choice("fused_optimizer", "fused"),
    )
    for choices in ([exact], [exact, bf16], [bf16, merged], [], [exact, merged]):
        skipped += trial.switch(choices, seconds() + ANSWER_S)["skipped"]
        trial.go(6, seconds() + ANSWER_S)
    found["replica"] = trial.ask(
        {"do": "replica", "choices": [exact.to_json(), bf16.to_json()]}, seconds() + ANSWER_S
    )["replica"]
    trial.go(6, seconds() + ANSWER_S)
    record = trial.finish()
found["status"], found["first loss"] = record.status, record.losses[0]
found["first losses"] = [(folder / f"first.{rank}").read_text() for rank in (0, 1)]
found["skipped"], found["info"] = skipped, [(folder / f"seen.{rank}").read_text().split() for rank in (0, 1)]
print(json.dumps(found))
