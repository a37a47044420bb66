"""Small training programs, each with one detail that exact resume could miss: `TRAPS`, by name.

``bench/more_traps.py`` adds those that no test runs.

Each prints its final state in lines that begin with ``end``, which must be the same after a kill. Values that
differ between undisturbed runs (clocks, process numbers) are compared by the program with its own record; it
prints whether they are consistent.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field, replace

HEAD = """\
import copy, hashlib, json, os, pickle, random, shutil, sys, time
from collections import deque
import numpy
import torch
from torch import nn
from torch.nn import functional

random.seed(3)
numpy.random.seed(3)
torch.manual_seed(3)
STEPS = 24
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = torch.randn(48, 6)


def batch(step):
    return data[step * 8 % 48:][:8]


def train(x, noise=0.0):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True) - noise).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def digest(*things):
    whole = hashlib.sha256()
    for thing in things:
        whole.update(thing.detach().contiguous().numpy().tobytes() if isinstance(thing, torch.Tensor) else repr(thing).encode())
    return whole.hexdigest()[:12]


def end(*things):
    print("end", digest(*model.state_dict().values()), *(digest(thing) if isinstance(thing, torch.Tensor) else thing for thing in things), flush=True)


"""


@dataclass(frozen=True)
class Trap:
    """``files``: files next to the program.

    ``between``: files rewritten while it is dead. ``later``: changes to its environment after that.
    ``itself``: undisturbed runs print different lines, so each must be consistent with itself.
    """

    body: str
    files: dict[str, str] = field(default_factory=dict)
    between: dict[str, str] = field(default_factory=dict)
    later: dict[str, str] = field(default_factory=dict)
    itself: bool = False
    before: str = ""  # lines before torch is imported
    fresh: bool = False  # requires its own process

    @property
    def source(self):
        return self.before + HEAD + textwrap.dedent(self.body)

    @property
    def in_a_process_of_its_own(self):
        return replace(self, fresh=True)


STEPS = 24  # of each
TRAPS = {}


def trap(name, body, **more):
    TRAPS[name] = Trap(body, **more)


# -- values computed on the device and read late

trap(
    "accumulator_made_before",
    """
    total, seen = torch.zeros(()), torch.zeros(6)
    for step in range(STEPS):
        total += train(batch(step)).detach()
        seen += model[0].weight.detach().sum(0)
    end(total, seen)
""",
)
trap(
    "large_table_through_data",
    """
    table = torch.zeros(40_000)
    for step in range(STEPS):
        loss = train(batch(step))
        if step > 5:
            table.data[step * 39 + 1] = loss.detach()
    end(table)
""",
)
trap(
    "hidden_state_with_its_graph",
    """
    drift = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [drift]})
    state = torch.zeros(1)
    for step in range(STEPS):
        state = state * 0.5 + drift
        optimizer.zero_grad()
        (model(batch(step)) + state - 1).square().mean().backward(retain_graph=True)
        optimizer.step()
    end(state, drift)
""",
)
trap(
    "replay_buffers",
    """
    rows, last, by_step = [], deque(maxlen=5), {}
    for step in range(STEPS):
        x = batch(step)
        if rows and random.random() < 0.5:
            x = x + 0.1 * random.choice(rows) + 0.1 * random.sample(list(last), 1)[0] + 0.1 * by_step[random.choice(sorted(by_step))]
        train(x)
        out = model[0](x).detach()[:, :6]
        rows.append(out)
        last.append(out * 2)
        by_step[f"at {step}"] = out * 3
    end(torch.stack(rows), torch.stack(tuple(last)))
""",
)
trap(
    "loader_in_a_cycle",
    """
    import itertools
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
    for step, x in zip(range(STEPS), itertools.cycle(loader)):
        train(x)
    end()
""",
)
AHEAD = """
    def ahead(loader):
        batches = iter(loader)
        current = next(batches) * 0.5
        for coming in batches:
            yield current
            current = coming * 0.5
        yield current
    def counted(loader):
        for at, x in enumerate(ahead(loader)):
            yield x + at
"""
trap(
    "batches_fetched_ahead",
    AHEAD
    + """
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
    for epoch in range(STEPS // 6):
        for x in counted(loader):
            train(x)
    end()
""",
)
trap(
    "batches_fetched_ahead_of_workers",
    AHEAD
    + """
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True, num_workers=2)
    for epoch in range(STEPS // 6):
        for _, x in enumerate(ahead(loader)):
            train(x)
    end()
""",
)
trap(
    "loaded_again_in_an_enumerate",
    """
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data)
    def fit(loader):
        for pair in enumerate(loader):
            train(*pair[1:])
    for epoch in range(STEPS // 6):
        fit(torch.utils.data.DataLoader(Rows(), 8))
    end()
""",
)
trap(
    "loaded_again_in_a_cycle",
    """
    import itertools
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return (row * torch.rand(()) for row in data)
    for step, x in zip(range(STEPS), itertools.cycle(torch.utils.data.DataLoader(Rows(), 8))):
        train(functional.dropout(x))
    end()
""",
)
trap(
    "gradients_detached_in_place",
    """
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.detach_()
                weight.grad.zero_()
        loss.backward()
        optimizer.step()
    end()
""",
)

# -- random numbers


trap(
    "own_generators",
    """
    of_numpy, of_torch, of_python = numpy.random.default_rng(1), torch.Generator().manual_seed(2), random.Random(3)
    steered = []
    for step in range(STEPS):
        x = batch(step) + torch.randn(8, 6, generator=of_torch) * of_numpy.standard_normal()
        if of_python.random() < 0.5:
            steered.append(int(torch.randint(9, (1,), generator=of_torch)) + int(of_numpy.integers(5)))
        train(x)
    end(steered, of_python.random(), of_numpy.random())
""",
)

# -- clocks, processes, files

STEERED = """
    ways, start = [], {start}
    for step in range(STEPS):
        time.sleep(0.004)
        {steer}
        train(batch(step), noise=0.3 if ways[-1] else 0.0)
        print("step", step, ways[-1], flush=True)
    reached = [value.clone() for value in model.state_dict().values()]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, way in enumerate(ways):
        train(batch(step), noise=0.3 if way else 0.0)
    print("end consistent", digest(*reached) == digest(*model.state_dict().values()), digest(ways), flush=True)
"""
trap(
    "clock_steers",
    STEERED.format(
        start="time.time()",
        steer="ways.append(time.time() - start > 0.02); start = time.time() if ways[-1] else start",
    ),
    itself=True,
)
trap(
    "process_number_kept",
    """
    number = os.getpid()
    print("began", number, flush=True)
    for step in range(STEPS):
        train(batch(step))
    print("end", number, flush=True)
""",
    itself=True,
)
trap(
    "best_is_loaded_back_from_its_file",
    """
    best = float("inf")
    for step in range(STEPS):
        loss = train(batch(step)).item()
        if loss < best or step == 14:
            best = loss
            torch.save(model.state_dict(), "best.pt")
        if step in (7, 12, 20):
            model.load_state_dict(torch.load("best.pt"))
            optimizer.param_groups[0]["lr"] *= 0.5
    end(best)
""",
)
BEST = """
    best = float("inf")
    for step in range(STEPS):
        loss = train(batch(step)).item() if step != 6 else -1.0 + 0 * train(batch(step)).item()
        if loss < best:
            best = loss
            {save}
        {also}
    end(*torch.load("best.pt", weights_only=False).values(), step)
"""
trap(
    "best_file_moved_into_place",
    BEST.format(save="torch.save(model.state_dict(), 'new.pt'); os.replace('new.pt', 'best.pt')", also=""),
)
trap(
    "last_three_files",
    """
    for step in range(STEPS):
        train(batch(step))
        torch.save(model.state_dict(), f"step{step}.pt")
        if step >= 3:
            os.remove(f"step{step - 3}.pt")
    end(sorted(name for name in os.listdir(".") if name.startswith("step")))
""",
)
trap(
    "goes_on_by_itself",
    """
    first = 0
    if os.path.exists("own.pt"):
        kept = torch.load("own.pt")
        first = kept["step"]
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    for step in range(first, STEPS):
        train(batch(step))
        if step % 5 == 4:
            torch.save({"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "own.pt")
    end()
""",
)
LOG = """
    {begin}
    for step in range(STEPS):
        loss = train(batch(step)).item()
        {write}
    {close}
    end(digest(open("log.txt").read()), len(open("log.txt").read().splitlines()))
"""
trap(
    "log_written_line_by_line",
    LOG.format(
        begin="log = open('log.txt', 'w', buffering=1)",
        write="log.write(f'{step} {loss}\\n')",
        close="log.close()",
    ),
)

# -- control flow

trap(
    "values_steer",
    """
    ways = []
    for step in range(STEPS):
        x = batch(step)
        loss = train(x)
        out = model(x).detach()[:, 0]
        ways.append((torch.equal(out, out.abs()), torch.allclose(out, out.mean(), atol=1.0), len(out.nonzero()), out[out > 0].shape[0],
                     out.round().unique().numel(), bool(torch.isnan(loss).any()), f"{loss:.3f}", round(float(loss), 2), int(out.argmax())))
        if ways[-1][3] > 3:
            train(x[out > 0])
        for _ in range(out.argmax()):
            x = x * 0.9
        train(x)
    end(digest(ways))
""",
)


# -- data

COUNTS = """
    class Counts(torch.utils.data.{kind}):
        def __init__(self):
            self.calls = 0
        def __len__(self):
            return 48
        {gives}
    {also}
    loader = torch.utils.data.DataLoader({set}, 8{more})
    for epoch in range(4):
        for x in loader:
            train({x})
    end({shows})
"""
BY_INDEX = """def __getitem__(self, at):
            self.calls += 1
            return {value}"""
trap(
    "data_set_counts",
    COUNTS.format(
        kind="Dataset",
        gives=BY_INDEX.format(value="data[at] + 0.01 * self.calls"),
        also="mine = Counts()",
        set="mine",
        more=", shuffle=True",
        x="x",
        shows="mine.calls",
    ),
)
trap(
    "persistent_workers",
    COUNTS.format(
        kind="Dataset",
        gives=BY_INDEX.format(value="data[at] + 0.01 * self.calls + random.random()"),
        also="",
        set="Counts()",
        more=", shuffle=True, num_workers=2, persistent_workers=True",
        x="x",
        shows="",
    ),
)
ITERATES = """def __iter__(self):
            for at in range(0, 48{by}):
                self.calls += 1
                yield data[at] + 0.01 * self.calls + random.random()"""
trap(
    "iterable_data_set_with_workers",
    COUNTS.format(
        kind="IterableDataset",
        gives=ITERATES.format(by=", 2"),
        also="",
        set="Counts()",
        more=", num_workers=2",
        x="x",
        shows="",
    ),
)

# -- state that is easy to overlook

trap(
    "teacher_in_a_generator_in_a_zip",
    """
    def teacher():
        mean = copy.deepcopy(model)
        while True:
            with torch.no_grad():
                for slow, fast in zip(mean.parameters(), model.parameters()):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
                told = mean(data).mean().item()
            yield told
    for step, told in zip(range(STEPS), teacher()):
        train(batch(step), noise=told)
    end(told)
""",
)
trap(
    "rows_in_a_database",
    """
    import sqlite3
    rows = sqlite3.connect("log.db")
    rows.execute("create table if not exists losses (step integer, loss real)")
    for step in range(STEPS):
        loss = train(batch(step)).item()
        with rows:
            rows.execute("insert into losses values (?, ?)", (step, loss))
    end(rows.execute("select count(*), sum(loss) from losses").fetchall())
""",
)

# -- one for each check, detected by no other
# The position of an `itertools.cycle` cannot be compared, and a file `flag` that appears meanwhile changes
# the program's control flow there.

TURNS = """
    import itertools
    scale = itertools.cycle([0.7, 1.0, 1.2, 1.3])
    for step in range(STEPS):
        {before}
        loss = train(batch(step) * next(scale))
    end(next(scale))
"""
FLAG = "os.path.exists('flag')"
trap(
    "other_place_before_the_save",
    TURNS.format(before=f"step == 10 and ((next(scale), loss.item()) if {FLAG} else loss.item())"),
    between={"flag": ""},
)
trap(
    "reads_less_before_the_save",
    TURNS.format(before=f"step == 10 and not {FLAG} and (next(scale), loss.item())"),
    between={"flag": ""},
)
trap(
    "tensor_of_losses",
    """
    losses = []
    for step in range(STEPS):
        losses.append(train(batch(step)))
        mean = torch.tensor([loss.detach() for loss in losses[-4:]]).mean()
        optimizer.param_groups[0]["lr"] *= 0.99 if torch.tensor([losses[-1], mean]).argmax() else 1.01
    end()
""",
)
trap(
    "hard_samples_by_a_mask",
    """
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    x = x[x[:, 0] > -1]
    for step in range(STEPS):
        each = (model(x) - x.sum(1, keepdim=True)).square()[:, 0]
        hard = x[each > each.mean()]
        few = x[x[:, 1] > 0.1 * step]
        optimizer.zero_grad()
        loss = (each[each > each.mean()].mean() + (model(hard) - hard[[True] * 2 + [False] * (len(hard) - 2)].sum()).square().mean()
                + model(few)[(few[:, 0] > 0).numpy()].square().sum())
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.99 if len(hard) % 2 else 1.01
    end()
""",
)
ROWS = """
    data = torch.randn(96, 6, generator=torch.Generator().manual_seed(5))
    drop = torch.nn.Dropout(0.2)
    for epoch in range(STEPS // 6):
        {order}
        for rows in {rows}:
            {x}
            optimizer.zero_grad()
            (model(drop(x)) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    end()
"""
trap(
    "rows_of_an_order_that_only_a_loop_has",
    ROWS.format(order="pass", rows="torch.randperm(96).split(16)", x="x = data[rows]"),
)
trap(
    "sequences_packed",
    """
    torch.manual_seed(3)
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
    lstm = torch.nn.LSTM(6, 5, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True)
    optimizer.add_param_group({"params": [*lstm.parameters()]})
    for step in range(STEPS):
        lengths = torch.randint(1, 9, (4,), generator=torch.Generator().manual_seed(step))
        x = torch.randn(4, int(lengths.max()), 6, generator=torch.Generator().manual_seed(step))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        rows, (_, cell) = lstm(packed)
        rows, how_long = pad_packed_sequence(rows, batch_first=True)
        loss = rows.square().sum() / how_long.sum() + cell.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    end(*lstm.parameters())
""",
)
trap(
    "mask_made_meanwhile",
    """
    for step in range(STEPS):
        if step == 8 and os.path.exists("flag"):
            mask = torch.full((6,), 0.5)
        train(batch(step) * globals().get("mask", 1.0))
    end()
""",
    between={"flag": ""},
)
trap(
    "generator_of_another_kind",
    """
    own = numpy.random.RandomState(7) if os.path.exists("flag") else numpy.random.default_rng(7)
    for step in range(STEPS):
        train(batch(step) * own.random())
    end()
""",
    between={"flag": ""},
)
trap(
    "random_in_turns_in_a_cycle",
    """
    import itertools
    class Draws(torch.utils.data.Dataset):
        def __len__(self):
            return 48
        def __getitem__(self, at):
            return data[at] + random.random()
    for epoch in range(4):
        for at, x in enumerate(torch.utils.data.DataLoader(Draws(), 8, shuffle=True)):
            if at % 3 == 0:
                scale = itertools.cycle([random.random()])
            train(x * next(scale))
    end()
""",
)
trap(
    "numbers_change_meanwhile",
    """
    import itertools
    scale = itertools.cycle(map(float, open("numbers.txt").read().split()))
    for step in range(STEPS):
        train(batch(step) * next(scale))
    end(next(scale))
""",
    files={"numbers.txt": "1.0 1.1"},
    between={"numbers.txt": "0.5 1.1 1.2"},
)
trap(
    "best_read_after_the_checkpoint",
    """
    for step in range(STEPS):
        loss = train(batch(step)).item()
        if step in (7, 14):
            open("best.txt", "w").write(str(loss))
        if step == 13:
            optimizer.param_groups[0]["lr"] *= float(open("best.txt").read())
    end()
""",
)
trap(
    "server_answers_otherwise",
    """
    import itertools, socket, threading
    server = socket.create_server(("0.0.0.0", 0))
    def serve():
        while True:
            other, _ = server.accept()
            file = os.open("answer.txt", os.O_RDONLY)
            other.sendall(os.read(file, 99))
            os.close(file)
            other.close()
    def ask():
        with socket.create_connection(("0.0.0.0", server.getsockname()[1])) as asked:
            return float(asked.recv(99))
    threading.Thread(target=serve, daemon=True).start()
    scale = itertools.cycle([ask()])
    for step in range(STEPS):
        train(batch(step) * next(scale))
    end(next(scale))
""",
    files={"answer.txt": "1.0"},
    between={"answer.txt": "0.5"},
)
trap(
    "helper_changes_meanwhile",
    """
    import helper
    for step in range(STEPS):
        train(helper.scaled(batch(step)))
    end()
""",
    files={"helper.py": "def scaled(x):\n    return x\n"},
    between={"helper.py": "def scaled(x):\n    return x * 0.5\n"},
)
