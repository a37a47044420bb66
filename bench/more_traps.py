"""Training programs that exact resume could miss, beside those of ``tests/resume/traps.py``: of kinds that the test suite
covers with one of those. `TRAPS` are all of them, by name.
"""

from __future__ import annotations

import sys

from provenance import ROOT

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "resume"))
from traps import FLAG, TRAPS, TURNS, trap  # type: ignore[attr-defined]  # of tests/resume

__all__ = ["TRAPS"]

trap(
    "sum_kept_by_forward",
    """
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.seen, self.calls = nn.Linear(6, 1), torch.zeros(()), 0
        def forward(self, x):
            self.calls += 1
            self.seen = self.seen + x.mean()
            out = self.inner(x)
            self.largest = out.detach().max() if self.calls == 1 else torch.maximum(self.largest, out.detach().max())
            return out * (0.5 if self.calls % 3 == 0 else 1.0)
    model = Keeps()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(STEPS):
        train(batch(step))
    end(model.seen, model.largest, model.calls)
""",
)
trap(
    "large_list",
    """
    total = 0.0
    wide = torch.linspace(-1, 1, 20_000)
    for step in range(STEPS):
        loss = train(batch(step))
        total += sum((wide * loss.detach()).tolist())
    end(total)
""",
)
trap(
    "gradient_hook_clamps",
    """
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    for step in range(STEPS):
        train(batch(step))
    end()
""",
)
trap(
    "optimizer_in_the_backward_pass",
    """
    del optimizer
    optimizers = {weight: torch.optim.SGD([weight], lr=0.05, momentum=0.9) for weight in model.parameters()}
    def update(weight):
        optimizers[weight].step()
        optimizers[weight].zero_grad()
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        x = batch(step)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    end()
""",
)
OWN_FUNCTION = """
    class Doubles(torch.autograd.Function):
        calls = back = 0
        @staticmethod
        def forward(ctx, x):
            Doubles.calls += 1
            ctx.save_for_backward(x)
            return x * 2
        @staticmethod
        def backward(ctx, gradient):
            {counts}
            return gradient * 2 * (1 + 0.1 * ctx.saved_tensors[0].sign())
    for step in range(STEPS):
        x = batch(step)
        optimizer.zero_grad()
        loss = (Doubles.apply(model(x)) - 1).square().mean()
        loss.backward()
        norm = sum(p.grad.norm() for p in model.parameters() if p.grad is not None)
        if norm > 1:
            for p in model.parameters():
                p.grad.div_(norm)
        optimizer.step()
    end(Doubles.calls, Doubles.back, norm)
"""
trap("own_function", OWN_FUNCTION.format(counts="pass"))
trap(
    "own_optimizer",
    """
    class Own(torch.optim.Optimizer):
        def __init__(self, weights):
            super().__init__(weights, {"lr": 0.05})
            self.count, self.mean = 0, torch.zeros(())
        @torch.no_grad()
        def step(self):
            self.count += 1
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["mean"], state["steps"] = torch.zeros_like(p), 0
                    state["steps"] += 1
                    state["mean"].mul_(0.9).add_(p.grad)
                    self.mean += p.grad.mean()
                    p.add_(state["mean"], alpha=-group["lr"] / state["steps"] ** (0.5 if self.count % 2 else 0.3))
    optimizer = Own(model.parameters())
    for step in range(STEPS):
        train(batch(step))
    end(optimizer.mean, optimizer.count, [state["steps"] for state in optimizer.state.values()])
""",
)
trap(
    "optimizer_with_a_closure",
    """
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    calls = 0
    for step in range(STEPS):
        def closure():
            global calls
            calls += 1
            optimizer.zero_grad()
            loss = (model(batch(step)) - 1).square().mean()
            loss.backward()
            return loss
        optimizer.step(closure)
    end(calls)
""",
)
SCALED = """
    scaler = torch.amp.GradScaler("cpu", enabled={enabled}, growth_interval=5, init_scale=2.0 ** 10)
    for step in range(STEPS):
        x = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss * (float("inf") if step in (3, 13) and {enabled} else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    end(scaler.get_scale())
"""
trap("scaler", SCALED.format(enabled=True))
trap(
    "sparse_gradients",
    """
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.05)
    for step in range(STEPS):
        loss = (model(torch.arange(step % 7, step % 7 + 4)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    end()
""",
)
trap(
    "tied_and_frozen_and_added",
    """
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave, self.fixed, self.more = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), None
            self.leave.weight = self.enter.weight
            self.fixed.requires_grad_(False)
            self.norm = nn.BatchNorm1d(6)
        def forward(self, x):
            x = self.norm(self.fixed(self.leave(torch.tanh(self.enter(x)))))
            return x if self.more is None else self.more(x)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(4):
        if epoch == 1:
            model.more = nn.Linear(6, 6)
            optimizer.add_param_group({"params": model.more.parameters(), "lr": 0.1})
        if epoch == 2:
            model.fixed.requires_grad_(True)
        for step in range(6):
            train(batch(step))
    end(len(optimizer.param_groups))
""",
)
trap(
    "numpy_shares_memory",
    """
    table = torch.zeros(STEPS)
    as_numpy = table.numpy()
    other = numpy.zeros(STEPS, dtype=numpy.float32)
    as_tensor = torch.from_numpy(other)
    for step in range(STEPS):
        loss = train(batch(step) + table.mean() + as_tensor.mean())
        as_numpy[step] = loss.item()
        other[step] = loss.detach().numpy() * 2
    end(table, as_tensor, float(as_numpy.sum()), float(other.sum()))
""",
)
trap(
    "another_program_writes",
    """
    import subprocess
    for step in range(STEPS):
        loss = train(batch(step)).item()
        if step % 4 == 0:
            subprocess.run(["sh", "-c", f"echo {step} {loss} >> log.txt"], check=True)
    end(open("log.txt").read().split())
""",
)
trap(
    "array_in_a_file",
    """
    table = numpy.memmap("table.bin", dtype="float64", mode="w+", shape=(STEPS, 2))
    for step in range(STEPS):
        table[step] = step, train(batch(step)).item()
    table.flush()
    end(digest(open("table.bin", "rb").read()))
""",
)
trap(
    "other_way_in_the_middle",
    TURNS.format(before=f"step == 6 and ((next(scale), loss.item()) if {FLAG} else loss.item())"),
    between={"flag": ""},
)
trap(
    "reads_more_before_the_save",
    TURNS.format(before=f"step == 10 and {FLAG} and (next(scale), loss.item())"),
    between={"flag": ""},
)
trap(
    "leaves_early",
    """
    for step in range(STEPS):
        if os.path.exists("flag"):
            break
        train(batch(step))
    print("end", step, flush=True)
""",
    between={"flag": ""},
)
NUMBERS = """
    import itertools
    scale = itertools.cycle([{number}])
    print("began", next(scale), flush=True)
    for step in range(STEPS):
        train(batch(step) * (1 + next(scale) % 7 / 7))
    print("end", next(scale), flush=True)
"""
trap(
    "large_list_of_the_machine",
    NUMBERS.format(
        number="sum(torch.frombuffer(bytearray(os.urandom(2_400_000)), dtype=torch.int32).double().tolist())"
    ),
    itself=True,
)
trap(
    "large_list_that_was_computed",
    """
    import itertools
    wide, scale = torch.linspace(0, 1, 1_500_000), itertools.cycle([1.0])
    for step in range(STEPS):
        loss = train(batch(step) * next(scale))
        if step == 4:
            scale = itertools.cycle([1 + max((wide * loss.detach()).tolist())])
    end(next(scale))
""",
)
trap(
    "thread_reads_the_same_clock",
    """
    import itertools, threading
    def now():
        return time.time()
    beside = threading.Thread(target=now)
    if os.path.exists("flag"):  # whichever comes first
        beside.start()
        beside.join()
    scale = itertools.cycle([now()])
    if not os.path.exists("flag"):
        beside.start()
        beside.join()
    print("began", next(scale), flush=True)
    for step in range(STEPS):
        train(batch(step) * (next(scale) % 1))
    print("end", next(scale), flush=True)
""",
    between={"flag": ""},
    itself=True,
)
trap(
    "weights_in_the_memory_of_another_tensor",
    """
    for step in range(STEPS):
        loss = train(batch(step))
        if step % 4 == 1:
            with torch.no_grad():
                flat = torch.cat([weight.flatten() for weight in model.parameters()]) * 0.9
                at = 0
                for weight in model.parameters():
                    weight.data = flat[at:at + weight.numel()].view_as(weight)
                    at += weight.numel()
        if step % 4 == 3:
            flat.mul_(1.1)
    end(flat)
""",
)
trap(
    "stream_that_draws",
    """
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for _ in range(4 * STEPS):
                yield torch.randn(6)
    torch.manual_seed(1)
    for epoch in range(2):
        for step, x in zip(range(STEPS // 2), torch.utils.data.DataLoader(Stream(), batch_size=4)):
            train(x)
    end()
""",
)
trap(
    "optimizer_in_a_cache",
    """
    from functools import lru_cache
    @lru_cache(maxsize=None)
    def second():
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        if step == 5 and not os.path.exists("flag"):
            second().load_state_dict(optimizer.state_dict())
        if step == 12:
            optimizer = second()
        train(batch(step))
    end()
""",
    between={"flag": ""},
)
HELD = """
    import threading, weakref
    of_this = threading.local()
    of_this.mean = torch.zeros({size})
    {also}
    for step in range(STEPS):
        loss = train(batch(step))
        {write}
    end(of_this.mean)
"""
trap(
    "weights_of_a_thread_known_weakly",
    HELD.format(
        size=6,
        also="of_this.weak = weakref.ref(of_this.mean)",
        write="of_this.mean += model[0].weight.detach().sum(0)",
    ),
)
trap(
    "more_than_can_be_looked_through",
    """
    batches = data.split(8)
    many = [{"at": number} for number in range(210_000)]
    number = [os.getpid()]
    print("began", number, flush=True)
    for step in range(STEPS):
        train(batches[step % 6])
    print("end", number, flush=True)
""",
    itself=True,
)
trap(
    "log_that_gets_another_header",
    """
    for step in range(STEPS):
        loss = train(batch(step)).item()
        if step == 14:
            rows = open("log.csv").read()
            open("log.csv", "w").write("step and loss\\n" + rows)
        print(step, loss, file=open("log.csv", "a"))
    end(open("log.csv").read())
""",
)
WIDE = """
    wide = torch.linspace(0, 1, {size})
    for step in range(STEPS):
        train(batch(step) * ((wide + data[step, 0]).exp().sum() / {size}))
    end()
"""
trap(
    "processor_without_wide_registers",
    WIDE.format(size="1000"),
    later={"ATEN_CPU_CAPABILITY": "default"},
    fresh=True,
)
trap("more_threads_than_before", WIDE.format(size="1_000_003"), later={"OMP_NUM_THREADS": "2"}, fresh=True)
