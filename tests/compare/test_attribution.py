"""Which operators account for a difference: matching, intervals, rows, planted slow-downs in a real program."""

import json
import random

import pytest

from flatout.compare import sides
from flatout.compare.attribution import IDLE, PYTHON, REST, WAITING, blame, costs_of, match
from flatout.compare.evaluate import stop_rule
from flatout.compare.pairs import Pair, Run
from flatout.render.compare_page import compare_page
from flatout.render.page import html
from flatout.schema.compare import Change, CompareRecord, SideRecord
from flatout.schema.errors import UsageError
from flatout.schema.records import TrialRecord

FORWARD = ("h = self.fc(x)", 10, "Net.forward")
SLOWER, EQUAL = Change(0.1, 0.05, 0.15, 4), Change(0.0, -0.05, 0.05, 4)


def op(name, ms, line=FORWARD, shapes="(4, 4)", dtype="float32", calls=1.0):
    text, number, function = line
    place = {"file": "a.py", "line": number, "text": text, "function": function}
    fields = {"name": f"aten::{name}", "calls": calls, "host_ms": ms, "place": place}
    return ms, {**fields, "dtypes": [dtype], "shapes": [shapes]}


def recorded(*ops, python=0.2, waiting=0.1, **settings):
    """What the probe returns. Shares are of the recorded step, which is longer than the undisturbed one."""
    total = sum(ms for ms, _ in ops) or 1.0
    operations = [{**fields, "share": ms / total} for ms, fields in ops]
    return {
        "operations": operations,
        "python_share": python,
        "waiting_share": waiting,
        "settings": settings,
    }


def run(step_ms, operations, **record):
    return Run(TrialRecord("finished", **record), 1.0, [step_ms] * 4, operations)


def pairs_of(a, b, count=4, noise=0.0):
    """Pairs of lists of operators, whose steps last as long as their operators and 30 % of other parts."""
    draw = random.Random(0)

    def side(ops):
        ops = [(ms * (1 + noise * draw.gauss(0, 1)), fields) for ms, fields in ops]
        return run(sum(ms for ms, _ in ops) / 0.7, recorded(*ops))

    return [Pair(i, side(a), side(b)) for i in range(count)]


def costs(observed):
    return costs_of([run(10.0, observed)], [10.0])


def matched(a, b):
    pairs = match(costs(recorded(*a)), costs(recorded(*b)))
    names = [[sorted(key.name.removeprefix("aten::") for key in side) for side in pair] for pair in pairs]
    return [pair for pair in names if not {*pair[0], *pair[1]} & {PYTHON, WAITING, REST}]


# -- matching


def test_the_same_call_is_matched_although_its_line_moved():
    def program(start):
        lines = ("h = self.fc(x)", start, "f"), ("y = self.out(h)", start + 1, "f")
        return [op("addmm", 1, line) for line in lines]

    assert matched(program(1), program(8)) == 2 * [[["addmm"], ["addmm"]]]


def test_a_comprehension_belongs_to_its_function():
    inside = ("h = [self.fc(row) for row in x]", 10, "Net.forward.<locals>.<listcomp>")
    before = ("x = self.norm(x)", 9, "Net.forward")
    a, b = [op("mul", 1, before), op("addmm", 1)], [op("mul", 1, before), op("mm", 1, inside)]
    assert matched(a, b) == [[["mul"], ["mul"]], [["addmm"], ["mm"]]]


def test_equal_names_at_two_lines_stay_apart():
    other = ("y = self.out(h)", 11, "Net.forward")
    both = [op("addmm", 1), op("addmm", 3, other)]
    assert matched(both, both) == 2 * [[["addmm"], ["addmm"]]]


def test_what_replaces_an_operator_at_its_line_is_a_change_of_path():
    a, b = [op("flash", 1), op("mul", 1)], [op("bmm", 1), op("_softmax", 1), op("mul", 1)]
    assert matched(a, b) == [[["mul"], ["mul"]], [["flash"], ["_softmax", "bmm"]]]


def test_what_replaces_an_operator_is_found_before_what_moved():
    elsewhere = ("y = q @ k", 30, "removed")
    a, b = [op("flash", 1), op("bmm", 1, elsewhere)], [op("bmm", 1)]
    assert matched(a, b) == [[["flash"], ["bmm"]], [["bmm"], []]]


def test_an_edited_line_is_matched_by_the_line_before_it():
    before = ("x = self.norm(x)", 9, "Net.forward")
    edited = ("h = self.fc(x.clone())", 10, "Net.forward")
    a = [op("native_layer_norm", 1, before), op("addmm", 1)]
    b = [op("native_layer_norm", 1, before), op("copy_", 1, edited), op("addmm", 1, edited)]
    assert matched(a, b)[1:] == [[["addmm"], ["addmm"]], [[], ["copy_"]]]


def test_two_edits_of_a_function_stay_apart():
    def program(first, second):
        return [
            op("mul", 1, ("x = x * 2", 1, "f")),
            op(first, 1, (f"x = {first}(x)", 2, "f")),
            op("add", 1, ("x = x + 2", 3, "f")),
            op(second, 1, (f"x = {second}(x)", 4, "f")),
        ]

    assert matched(program("flash", "native_layer_norm"), program("bmm", "var_mean"))[2:] == [
        [["flash"], ["bmm"]],
        [["native_layer_norm"], ["var_mean"]],
    ]


def test_a_call_that_moved_to_another_function_is_matched_by_name_and_shape():
    wrapper = ("return linear(more, weight)", 3, "wrapper")
    a = [op("addmm", 1, shapes="(4, 4)"), op("addmm", 1, shapes="(8, 8)")]
    b = [op("addmm", 1, wrapper, "(8, 8)"), op("addmm", 1, wrapper, "(5, 4)"), op("cat", 1, wrapper)]
    assert matched(a, b) == [[["addmm"], ["addmm"]], [["addmm"], ["addmm"]], [[], ["cat"]]]


# -- costs


def test_the_rows_add_up_to_the_undisturbed_step():
    found = costs(recorded(op("mm", 30), op("add", 10), python=0.3, waiting=0.2))
    assert {key.name: cost.ms[0] for key, cost in found.items()} == pytest.approx(
        {"aten::mm": 3.75, "aten::add": 1.25, WAITING: 2.0, PYTHON: 3.0, REST: 0.0}
    )


def test_kernels_of_a_device_keep_their_time_and_the_rest_is_idle():
    observed = recorded(op("mm", 3))
    observed["operations"][0]["device_ms"] = 3.0
    found = {key.name: cost.ms[0] for key, cost in costs(observed).items()}
    assert found == pytest.approx({"aten::mm": 3.0, WAITING: 1.0, PYTHON: 0.0, IDLE: 6.0})


# -- rows


def test_a_new_copy_is_blamed_with_its_interval_and_the_rows_add_up():
    a = [op("addmm", 5.0), op("mul", 1.0)]
    b = [*a, op("copy_", 1.4, calls=2.0), op("empty_like", 0.001)]
    result = blame(pairs_of(a, b, noise=0.01), SLOWER)
    first = result.rows[0]
    assert (first.name, first.change, first.a_calls, first.b_calls) == ("aten::copy_", "new", 0, 2)
    assert first.blamed
    assert first.low < 1.4 < first.high
    assert first.place.text == FORWARD[0]
    assert sum(row.ms for row in result.rows) == pytest.approx(result.ms)
    assert first.share == pytest.approx(first.ms / result.ms)


def test_a_row_whose_interval_includes_0_is_not_blamed():
    a = [op("addmm", 5.0), op("mul", 5.0)]
    pairs = pairs_of(a, a)
    for i, pair in enumerate(pairs):  # mul is as often slower as faster
        more = 2.0 if i % 2 else -1.0
        pair.b = run(16.0 / 0.7, recorded(op("addmm", 11.0 - more), op("mul", 5.0 + more)))
    rows = {row.name: row for row in blame(pairs, SLOWER).rows}
    assert rows["aten::mul"].low < 0 < rows["aten::mul"].high
    assert not rows["aten::mul"].blamed
    assert rows["aten::addmm"].blamed


def test_nothing_is_blamed_if_the_interval_of_the_whole_includes_0():
    pairs = pairs_of([op("addmm", 5.0), op("mul", 1.0)], [op("addmm", 5.3), op("mul", 1.0)])
    result = blame(pairs, EQUAL)
    assert result.verdict == "no difference: nothing to blame"
    assert not any(row.blamed for row in result.rows)
    assert any(row.blamed for row in blame(pairs, SLOWER).rows)


def test_rows_of_less_than_five_percent_of_the_whole_are_not_blamed():
    pairs = pairs_of([op("addmm", 5.0), op("mul", 1.0)], [op("addmm", 6.0), op("mul", 1.04)])
    blamed = [row.name for row in blame(pairs, SLOWER).rows if row.blamed]
    assert blamed[0] == "aten::addmm"
    assert "aten::mul" not in blamed


def test_a_pair_in_a_slow_moment_of_the_machine_counts_as_much_as_others():
    pairs = pairs_of([op("addmm", 5.0)], [op("addmm", 6.0)])
    for each in (pairs[0].a, pairs[0].b):
        each.blocks_ms = [3 * ms for ms in each.blocks_ms]
    result = blame(pairs, SLOWER)
    assert result.high - result.low == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("a", "b", "change"),
    [
        (op("mm", 1), op("mm", 2), "slower at the same calls"),
        (op("mm", 2), op("mm", 1), "faster at the same calls"),
        (op("mm", 1), op("mm", 2, calls=3.0), "more calls"),
        (op("mm", 1), op("mm", 2, dtype="float64"), "other dtype: float32 -> float64"),
        (op("mm", 1), op("mm", 2, shapes="(5, 4)"), "other shapes: (4, 4) -> (5, 4)"),
        (
            op("mm", 1),
            op("mm", 2, shapes="(5, 4)", calls=0.5),
            "fewer calls, other shapes: (4, 4) -> (5, 4)",
        ),
        (op("mm", 1), op("bmm", 2), "replaced"),
    ],
)
def test_what_changed_is_said(a, b, change):
    row = blame(pairs_of([a], [b]), SLOWER).rows[0]
    assert row.change == change
    assert row.before == ("aten::mm" if change == "replaced" else "")


def test_a_longer_wait_for_data_is_a_row():
    a, b = recorded(op("mm", 7.0)), recorded(op("mm", 7.0), python=0.1, waiting=0.55)
    first = blame([Pair(i, run(10.0, a), run(20.0, b)) for i in range(3)], SLOWER).rows[0]
    assert (first.name, first.change, first.blamed) == (WAITING, "longer", True)
    assert first.ms == pytest.approx(0.55 * 20 - 0.1 * 10)


def test_settings_that_differ_are_named():
    a = recorded(op("mm", 1), threads=2, optimizers=[{"fused": True}], training={"train": 3})
    b = recorded(op("mm", 1), threads=1, optimizers=[{"fused": False}], training={"train": 4})
    old, new = ({"torch": version} for version in ("2.11", "2.12"))
    pairs = [Pair(i, run(1.0, a, versions=old), run(2.0, b, versions=new)) for i in (0, 1)]
    assert blame(pairs, SLOWER).settings == [
        "optimizer.fused: True in A, False in B",
        "threads: 2 in A, 1 in B",
        "torch: 2.11 in A, 2.12 in B",
    ]


def test_the_page_has_the_rows_that_are_blamed_and_the_others_together():
    record = CompareRecord([], "", step_time=SLOWER)
    record.a, record.b = (SideRecord(name, ["python", "train.py"], step_ms=10.0) for name in "ab")
    a = [op("flash", 5.0), op("mul", 4.0), op("add", 1.0)]
    record.blame = blame(pairs_of(a, [op("bmm", 6.0), op("mul", 4.0), op("add", 0.98)]), SLOWER)
    page = html(compare_page(record))
    assert "What accounts for the difference" in page
    assert "aten::flash -&gt; aten::bmm: replaced" in page
    assert FORWARD[0] in page
    assert "all others" in page
    assert "aten::mul" not in page


def test_too_few_recordings_are_said():
    result = blame([Pair(0, run(1.0, None), run(1.0, None))], SLOWER)
    assert (result.verdict, result.rows) == ("the operators of 0 pairs could be recorded, of at least 2", [])


def test_pairs_suffice_once_the_difference_is_known_to_a_tenth():
    pairs = [Pair(i, run(10.0, None), run(20.0 + i / 10, None)) for i in range(4)]
    assert stop_rule(None, blame=True)(pairs)
    assert not stop_rule(None)([Pair(i, run(10.0, None), run(20.0 + i, None)) for i in range(4)])


# -- the command


def test_two_interpreters_are_two_sides():
    a, b = sides.python_sides(("python", "-c", "pass"), ("python", "python3"))
    assert (a.command.typed, b.command.typed) == (("python", "-c", "pass"), ("python3", "-c", "pass"))
    with pytest.raises(UsageError, match="give --python twice"):
        sides.python_sides(("train.py",), ("python",))


def test_blame_needs_both_programs(flatout):
    done = flatout.here("compare", "--blame", "--baseline", "a", "python", "train.py")
    assert "--blame needs both programs" in done.err


PROGRAM = """
import sys, time
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
PLANTED = len(sys.argv) > 1
SAMPLE = torch.ones(64)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        if PLANTED:
            time.sleep(0.001)
        return SAMPLE


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x):
        h = torch.relu(self.fc(x))
        return self.out(spread(h))


def spread(h):
    for _ in range(200 if PLANTED else 1):
        h = h.expand(64, *h.shape).clone()[0]
    return h


model = Net()
for epoch in range(100000):
    for x in torch.utils.data.DataLoader(Numbers(), 8):
        loss = model(x).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-9 * p.grad
"""


@pytest.mark.timeout(240)
@pytest.mark.processes
def test_a_planted_copy_and_a_slow_loader_are_named_with_their_lines(flatout):
    pytest.importorskip("torch")
    (flatout.folder / "train.py").write_text(PROGRAM)
    words = ("--blame", "--pairs", "4", "--budget", "1s")
    done = flatout("compare", *words, "python train.py", "python train.py planted")
    assert done.code == 0, done.err
    (path,) = flatout.folder.glob(".flatout/*/compare.json")
    blamed = [row for row in json.loads(path.read_text())["blame"]["rows"] if row["blamed"]]
    assert {row["name"] for row in blamed} >= {WAITING, "aten::copy_"}, blamed
    copy = next(row for row in blamed if row["name"] == "aten::copy_")
    assert copy["place"]["text"] == "h = h.expand(64, *h.shape).clone()[0]"
    assert copy["b_calls"] == pytest.approx(200 * copy["a_calls"])
    assert copy["change"] == "more calls"
    assert "What accounts for the difference" in done.out
    assert "h.expand(64" in done.out
    assert "aten::copy_: more calls" in path.with_suffix(".html").read_text()
