"""An edit of `flatout fix` keeps losses and printed numbers bit for bit, and is left out where it might not."""

import json
import re
import subprocess
import sys
import warnings

import pytest

from flatout.diagnose.check import check
from flatout.diagnose.fix import fixes
from flatout.diagnose.rules import TABLE
from flatout.probe.program import ScriptProgram

HEAD = """import os, torch
from torch.utils.data import DataLoader
device = torch.device(os.environ.get("DEVICE", "cpu"))
model = torch.nn.Linear(4, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.randn(30, 4)
"""
STEP = """        loss = model(x.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
EPOCHS = "for epoch in range(2):\n    for i, x in enumerate(DataLoader(data, batch_size=4)):\n"
SUM = (
    HEAD
    + """total, seen = 0.0, 0
for epoch in range(2):
    for i, x in enumerate(DataLoader(data, batch_size=4)):
"""
    + STEP
    + """        total += loss.item() * x.size(0)
        seen += len(x)
        if i % 3 == 2:
            print(f"{epoch} {total / seen:.17g}", "%.17g" % total, total)
print(total, round(total / seen, 6))
"""
)

# code: a program, lines of the fixed one, lines that are gone
CERTAIN = {
    "FL101": (
        SUM,
        (
            "        total += loss.detach().double() * x.size(0)",
            '            print(f"{epoch} {float(total) / seen:.17g}", "%.17g" % float(total), float(total))',
            "print(float(total), round(float(total) / seen, 6))",
        ),
    ),
    "FL303": (
        HEAD + 'model.load_state_dict(torch.load("b.pt"))\n' + EPOCHS + STEP,
        ('model.load_state_dict(torch.load("b.pt", map_location="cpu"))',),
    ),
    "FL311": (
        HEAD + EPOCHS + STEP.replace("x.to(", "torch.tensor(torch.tanh(x)).to("),
        ("        loss = model(torch.tanh(x).detach().clone().to(device)).square().mean()",),
    ),
    "FL110": (
        HEAD
        + EPOCHS.replace("enumerate(DataLoader(data, batch_size=4))", "enumerate(loader)").replace(
            "for epoch", "loader = DataLoader(data, batch_size=4)\nfor epoch"
        )
        + STEP.replace("x.to(device)", "x.to(device, non_blocking=True)"),
        ("loader = DataLoader(data, batch_size=4, pin_memory=True)",),
    ),
    "FL111": (
        HEAD + EPOCHS + STEP.replace(".square()", ".sub(torch.full((1,), 2.0).to(device)).square()"),
        ("        loss = model(x.to(device)).sub(torch.full((1,), 2.0, device=device)).square().mean()",),
    ),
}


def fixed(text, code):
    program = ScriptProgram.of_text(text)
    changed = fixes(program, check(program, [code]))
    return changed[0][1] if changed else text


@pytest.mark.parametrize("code", CERTAIN)
def test_the_edit_is_the_expected_one(code):
    before, lines = CERTAIN[code]
    after = fixed(before, code).splitlines()
    assert [line for line in after if line not in before.splitlines()] == list(lines)
    assert len(after) == len(before.splitlines())


LOSSES = """
import contextlib, io, json, sys, warnings
import torch
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.save(torch.nn.Linear(4, 1).state_dict(), "b.pt")
backward, losses = torch.Tensor.backward, []
def kept(self, *args, **kwargs):
    losses.append(self.detach().double().sum().item().hex())
    return backward(self, *args, **kwargs)
torch.Tensor.backward = kept
for code in json.load(sys.stdin):
    losses = []
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    print(json.dumps([losses, printed.getvalue()]))
"""


@pytest.mark.processes
def test_the_losses_stay_where_the_rule_says_so(tmp_path):
    programs, names = [], []
    for rule in TABLE:
        bad = rule.section("Bad").replace("num_workers=2", "num_workers=0").replace("range(100)", "range(5)")
        needs_gpu = "cuda" in bad.replace("torch.cuda.empty_cache", "")
        bad = CERTAIN[rule.code][0] if rule.code in CERTAIN else bad
        if rule.fix_changes != "" or "backward()" not in bad or (needs_gpu and rule.code not in CERTAIN):
            continue
        names.append(rule.code)
        programs += [bad, fixed(bad, rule.code)]
    done = subprocess.run(
        [sys.executable, "-c", LOSSES],
        input=json.dumps(programs),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    for name, (before, said), after in zip(names, seen[::2], seen[1::2], strict=True):
        assert len(before) >= 2, name
        assert [before, re.sub(r", grad_fn=<\w+>", "", said)] == after, name
    assert len(names) >= 9


WAIT = HEAD + "import time\n" + EPOCHS + STEP + "        torch.cuda.synchronize()\n"
DOUBTFUL = {
    "an unknown object computes the loss": HEAD.replace(
        "import os, torch", "import os, torch\nfrom other import Loss"
    )
    + "penalty = Loss()\n"
    + EPOCHS
    + STEP.replace("loss = model(x.to(device)).square().mean()", "loss = penalty(x)").replace(
        "backward()", "backward(retain_graph=True)"
    ),
    "a caller reads a clock": HEAD
    + "import time\ndef wait():\n    torch.cuda.synchronize()\n"
    + EPOCHS
    + STEP
    + "        wait()\n        print(time.time())\n",
    "an event is read": WAIT + "        print(begin.elapsed_time(end))\n",
    "a copy to the host": WAIT.replace(
        "loss.backward()", 'loss.backward()\n        shown = loss.to("cpu", non_blocking=True)'
    ),
    "every step shows it": SUM.replace("if i % 3 == 2", "if i >= 0"),
    "no float64": SUM.replace('"cpu"', '"mps"'),
    "divided on the device": SUM.replace("* x.size(0)", "/ x.size(0)"),
    "a tensor is added, too": SUM.replace("seen += len(x)", "total += x.sum()"),
    "it begins as a tensor": SUM.replace("total, seen = 0.0, 0", "total, seen = torch.zeros(1), 0"),
    "a closure reads it": SUM + "show = lambda: print(total)\nshow()\n",
    "a count": SUM.replace("loss.item() * x.size(0)", "(model(x) > 0).sum().item()"),
    "from a caller": HEAD + "def copied(x):\n    return torch.tensor(x)\nprint(copied(data))\n",
    "a device is current": HEAD.replace("model =", "gpu = None\nmodel =")
    + EPOCHS
    + STEP.replace(".square()", ".sub(torch.zeros(1).cuda(gpu)).square()"),
    "other random numbers": HEAD
    + EPOCHS
    + STEP.replace(".square()", ".sub(torch.rand(1).to(device)).square()"),
    "a leaf": HEAD
    + EPOCHS
    + STEP.replace(".square()", ".sub(torch.zeros(1, requires_grad=True).to(device)).square()"),
    "the loaded value is used": HEAD
    + EPOCHS
    + STEP
    + 'b = torch.load("b.pt")\nmodel.load_state_dict(b["m"])\nprint(b["x"])',
    "a type is given": HEAD + "print(torch.tensor(data, dtype=torch.float64))\n",
    "pinning is off": CERTAIN["FL110"][0].replace("batch_size=4)", "batch_size=4, pin_memory=False)"),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_doubtful_edit_is_left_out(name):
    program = ScriptProgram.of_text(DOUBTFUL[name])
    found = check(program)
    assert {"FL101", "FL103", "FL110", "FL203", "FL111", "FL303", "FL311"} & {
        finding.rule for finding in found
    }
    assert fixes(program, found) == []


def test_a_wait_without_use_is_removed():
    assert fixed(WAIT, "FL103") == WAIT.replace("        torch.cuda.synchronize()\n", "")


BIAS = """import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)
        for m in self.modules():
            {}
    def forward(self, x):
        return self.norm(self.conv(x))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "edited"),
    [
        ("pass", True),
        ("if isinstance(m, torch.nn.BatchNorm2d): torch.nn.init.zeros_(m.bias)", True),
        ("if type(m).__name__.find('BatchNorm') != -1: torch.nn.init.zeros_(m.bias)", True),
        ("if hasattr(m, 'bias') and m.bias is not None: torch.nn.init.zeros_(m.bias)", True),
        ("if isinstance(m, torch.nn.Conv2d): torch.nn.init.zeros_(m.bias)", False),
        ("if not isinstance(m, torch.nn.BatchNorm2d) and m is not self: torch.nn.init.zeros_(m.bias)", False),
        ("if hasattr(m, 'bias'): torch.nn.init.zeros_(getattr(m, 'bias'))", False),
        ("self.load_state_dict(torch.load('b.pt'))", False),
    ],
)
def test_a_bias_goes_only_where_nothing_reads_it(line, edited):
    text = BIAS.format(line)
    after = fixed(text, "FL114")
    assert after == (text.replace("3, 8, 3)", "3, 8, 3, bias=False)") if edited else text)
    exec(compile(after, "train.py", "exec"), {}) if edited else None


@pytest.mark.parametrize(
    "step", ["optimizer.step()", "optimizer.step()  # last\n        pass", "scaler.step(optimizer)"]
)
def test_a_step_clears_its_gradients(step):
    text = HEAD + "scaler = torch.amp.GradScaler(enabled=False)\n" + EPOCHS + STEP
    text = text.replace("        optimizer.zero_grad()\n", "").replace("optimizer.step()", step)
    line = step.split("\n")[0]
    assert fixed(text, "FL001") == text.replace(line, f"{line}\n        optimizer.zero_grad()")


NET = """import torch
import torch.nn.functional as F
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 4), torch.nn.Linear(4, 3)
    def forward(self, x):
        {}
        return F.log_softmax(x)
torch.manual_seed(0)
net = Net()
print(net(torch.randn({})).sum().item().hex())
"""


@pytest.mark.parametrize(
    ("lines", "sizes", "dim"),
    [
        ("x = x.view(-1, 8); x = F.relu(self.first(x)); x = self.last(F.dropout(x, 0.0))", "2, 2, 4", 1),
        ("x = torch.flatten(x, 1); x = self.first(x)", "2, 2, 4", 1),
        ("x = x.reshape((2, 2, 8)).relu()", "2, 16", 0),
        ("n, c, h, w = x.size()", "2, 2, 2, 2", 1),
        ("x = self.first(x)", "2, 8", None),
        ("x = x.view(x.shape)", "2, 8", None),
        ("x = x.view(2, 8) if x.dim() > 2 else x", "2, 8", None),
        ("n, *rest = x.shape", "2, 8", None),
    ],
)
def test_a_softmax_gets_the_dimension_that_it_has_now(lines, sizes, dim, capsys):
    text = NET.format(lines.replace("; ", "\n        "), sizes)
    after = fixed(text, "FL314")
    assert after == (text if dim is None else text.replace("log_softmax(x)", f"log_softmax(x, dim={dim})"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for code in (text, after):
            exec(compile(code, "train.py", "exec"), {})
    first, second = capsys.readouterr().out.split()
    assert first == second


EVALUATION = (
    HEAD
    + """def evaluate(loader):
    model.eval()
    total = 0
    # every batch
    for x in loader:
        # once

        y = model(x)
        total += {}
    model.train()
    return total
for epoch in range(2):
    for x in DataLoader(data, batch_size=4):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(evaluate(DataLoader(data, batch_size=4)))
"""
)


@pytest.mark.parametrize(
    ("added", "found", "edited"),
    [
        ("y.sum().item()  # a number", True, True),
        ('len("""1\n2""")', True, False),  # the text would change
        ("float(torch.autograd.grad(y.sum(), model.weight)[0].sum())", False, False),
    ],
)
def test_an_evaluation_gets_a_block_without_gradients(added, found, edited):
    text = EVALUATION.format(added)
    loop = text[text.index("    for x in loader") : text.index("    model.train()")]
    deeper = "".join(f"    {line}" if line.strip() else line for line in loop.splitlines(keepends=True))
    assert bool(check(ScriptProgram.of_text(text), ["FL201"])) is found
    expected = text.replace(loop, f"    with torch.no_grad():\n{deeper}") if edited else text
    assert fixed(text, "FL201") == expected
