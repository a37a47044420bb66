"""Equal parameter groups that are updated together: every bit of weights and state is that of a
group-by-group update, whatever happens to the groups.
"""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.agent.ledger import Ledger
from flatout.levers.fused_optimizer import LEVER
from flatout.schema.enums import Effect
from flatout.schema.facts import Facts
from flatout.schema.lever import Options, Skip

torch = pytest.importorskip("torch")
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

KINDS = {
    name: kind
    for name in torch.optim.__all__
    if isinstance(kind := getattr(torch.optim, name), type) and name not in ("Optimizer", "LBFGS")
}
FORMS = {"plain": {"foreach": False}, "usual": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
MORE = {
    "SGD": ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"maximize": True}),
    "Adam": ({"amsgrad": True}, {"maximize": True}),
    "AdamW": ({"capturable": False, "maximize": True},),
    "RMSprop": ({"momentum": 0.5, "centered": True},),
    "ASGD": ({"t0": 2.0},),
    "NAdam": ({"decoupled_weight_decay": True},),
    "Adagrad": ({"initial_accumulator_value": 0.1, "lr_decay": 0.1},),
}
SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def context(*optimizers):
    return SimpleNamespace(torch=torch, optimizers=list(optimizers), device_type="cpu")


def merge(optimizer):
    return LEVER.apply(context(optimizer), "merged", Ledger())


class Seen:
    """The number and names of the groups in each update."""

    def __init__(self, optimizer):
        self.updates = []
        really = optimizer._init_group

        def init_group(group, *args, **kwargs):
            self.updates[-1].append(len(group["params"]))
            return really(group, *args, **kwargs)

        optimizer._init_group = init_group
        optimizer.register_step_pre_hook(lambda *_: self.updates.append([]))

    @property
    def last(self):
        return sorted(self.updates[-1])


def groups_of(sizes, **options):
    """A group with this many parameters, each with a gradient."""
    found = []
    for at, size in enumerate(sizes):
        found.append(
            {
                "params": [torch.nn.Parameter(torch.randn(3, 2)) for _ in range(size)],
                **{name: value[at] for name, value in options.items()},
            }
        )
        for p in found[-1]["params"]:
            p.grad = torch.randn_like(p)
    return found


def test_a_step_reads_only_group_options_that_have_defaults():
    """Groups that differ in anything else (a name, the first learning rate of a schedule) are equal; a step
    writes nothing into a group.
    """
    read: set[str] = set()

    class Watched(dict):
        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

        def __setitem__(self, key, value):
            raise AssertionError(f"a step has written {key}")

    for name, kind in KINDS.items():
        for form in FORMS.values():
            if not set(form) <= set(inspect.signature(kind).parameters):
                continue
            optimizer = (
                kind(groups_of([2]), lr=0.01, **form)
                if name != "SparseAdam"
                else kind(sparse(groups_of([2])), lr=0.01)
            )
            read.clear()
            optimizer.param_groups = [Watched(optimizer.param_groups[0])]
            optimizer.step()
            optimizer.step()
            assert read - {"params"} <= set(optimizer.defaults), name


def sparse(groups):
    for group in groups:
        for p in group["params"]:
            p.grad = p.grad.to_sparse()
    return groups


# -- bitwise equality ----------------------------------------------------------------------------------------------------


EVENTS = st.sampled_from(
    ["step"] * 6
    + ["schedule"] * 3
    + ["lr", "decay", "zero lr", "freeze", "thaw", "add", "load", "on", "off", "closure", "raise", "list"]
)


@st.composite
def courses(draw):
    name = draw(st.sampled_from(sorted(set(KINDS) - {"SparseAdam"})))
    kind = KINDS[name]
    form = draw(
        st.sampled_from(
            [word for word, given_ in FORMS.items() if set(given_) <= set(inspect.signature(kind).parameters)]
        )
    )
    more = draw(st.sampled_from(({}, *MORE.get(name, ()))))
    count = draw(st.integers(2, 5))
    lrs = draw(st.lists(st.sampled_from([0.1, 0.03]), min_size=count, max_size=count))
    kinds = draw(
        st.lists(
            st.sampled_from(["float32", "float32", "float64", "bfloat16"]), min_size=count, max_size=count
        )
    )
    scheduler = draw(st.sampled_from(["none", "lambda", "cycle", "cosine"]))
    events = draw(st.lists(st.tuples(EVENTS, st.integers(0, 7)), min_size=4, max_size=14))
    tensor_lr = (
        draw(st.booleans()) and draw(st.booleans()) and name != "Muon" and form != "foreach"
    )  # older versions of torch do not take it there
    return name, {**FORMS[form], **more}, lrs, kinds, scheduler, [("on", 0), *events, ("step", 0)], tensor_lr


class Course:
    """One life of an optimizer. ``merging``: the lever is on between the events "on" and "off"."""

    def __init__(self, name, options, lrs, dtypes, scheduler, tensor_lr):
        self.draw = torch.Generator().manual_seed(1)
        self.kind, self.undo = KINDS[name], None
        groups = [
            {"params": self.made(dtype, at), "lr": lr, "name": f"group {at}"}
            for at, (lr, dtype) in enumerate(zip(lrs, dtypes, strict=True))
        ]
        if tensor_lr:
            shared = torch.tensor(0.05, dtype=torch.float64)
            groups = [
                {**group, "lr": shared if at % 2 else torch.tensor(group["lr"], dtype=torch.float64)}
                for at, group in enumerate(groups)
            ]
        self.frozen = set()
        self.optimizer = self.kind(groups, **options)
        self.scheduler = self.schedule(scheduler if not tensor_lr else "none", name)

    def made(self, dtype, at):
        return [
            torch.nn.Parameter(torch.randn(3, 2 + each, generator=self.draw).to(getattr(torch, dtype)))
            for each in range(1 + at % 2)
        ]

    def schedule(self, which, name):
        schedulers = torch.optim.lr_scheduler
        if which == "lambda":
            return schedulers.LambdaLR(
                self.optimizer,
                [
                    lambda epoch, at=at: 0.9 ** (epoch * (at // 2))
                    for at in range(len(self.optimizer.param_groups))
                ],
            )
        if which == "cosine":
            return schedulers.CosineAnnealingLR(self.optimizer, 5)
        if which == "cycle":
            cycles = "betas" in self.optimizer.defaults or "momentum" in self.optimizer.defaults
            return schedulers.OneCycleLR(
                self.optimizer, 0.1, total_steps=100, cycle_momentum=cycles and name not in ("Rprop",)
            )
        return None

    def gradients(self):
        for at, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                p.grad = None if at in self.frozen else torch.randn(p.shape, generator=self.draw).to(p.dtype)

    def goes(self, event, number, merging):
        optimizer = self.optimizer
        group = optimizer.param_groups[number % len(optimizer.param_groups)]
        if event in ("step", "closure", "raise"):
            self.steps(event)
        elif event == "schedule" and self.scheduler is not None:
            self.scheduler.step()
        elif event == "lr" and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = (0.1, 0.03, 0.01)[number % 3]
        elif event == "zero lr" and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = (0.0, -0.0)[number % 2]
        elif event == "decay" and "weight_decay" in group:
            group["weight_decay"] = (0.0, 0.1)[number % 2]
        elif event == "list" and "betas" in group:
            group["betas"] = list(group["betas"])
        elif event == "freeze":
            self.frozen.add(number % len(optimizer.param_groups))
        elif event == "thaw":
            self.frozen.clear()
        elif event == "add" and self.scheduler is None:
            optimizer.add_param_group({"params": self.made("float32", number), "lr": 0.1, "name": "late"})
        elif event == "load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif event in ("on", "off") and merging:
            self.switches(event == "on")

    def switches(self, on):
        if on and self.undo is None:
            self.undo = merge(self.optimizer)
        elif not on and self.undo is not None:
            self.undo()
            self.undo = None

    def steps(self, event):
        self.gradients()
        if event == "step":
            self.optimizer.step()
        elif event == "closure":
            shown = []

            def closure():
                shown.append(len(self.optimizer.param_groups))
                self.optimizer.param_groups[0]["lr"] *= (
                    0.5  # the choice of a closure holds for this very update
                )
                return torch.ones(())

            groups = len(self.optimizer.param_groups)
            assert self.optimizer.step(closure) == 1.0
            assert shown == [groups]
        else:

            def fails():
                raise KeyError("of the script's own")

            with pytest.raises(KeyError, match="own"):
                self.optimizer.step(fails)

    def shows(self):
        """Everything that the script can see, to the bit."""
        optimizer = self.optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return (
            [bits(p) for p in parameters],
            [[(name, bits(value)) for name, value in optimizer.state.get(p, {}).items()] for p in parameters],
            [
                {name: bits(value) for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ],
            bits(optimizer.state_dict()["param_groups"][0]["params"]),
        )


def bits(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return repr(value)


@given(courses())
@SETTINGS
def test_every_bit_is_that_of_an_update_group_by_group(course):
    *made, events, tensor_lr = course
    plain, merged = Course(*made, tensor_lr), Course(*made, tensor_lr)
    wrapper = plain.kind.step
    try:
        for event, number in events:
            plain.goes(event, number, merging=False)
            merged.goes(event, number, merging=True)
            assert merged.shows() == plain.shows(), event
    finally:
        merged.switches(on=False)
    assert plain.kind.step is wrapper
    assert sorted(vars(merged.optimizer)) == sorted(vars(plain.optimizer))


def test_zeros_of_two_signs_are_two_learning_rates():
    optimizer = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.tensor([-0.0]))], "lr": lr} for lr in (0.0, -0.0, 0.0)]
    )
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(1)
    undo = merge(optimizer)
    optimizer.step()
    undo()
    assert [repr(group["params"][0].item()) for group in optimizer.param_groups] == ["-0.0", "0.0", "-0.0"]


# -- which groups merge, and when --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_a_group_that_changes_leaves_before_the_next_update(form):
    optimizer = torch.optim.AdamW(
        groups_of([1, 2, 3, 4], weight_decay=[0.1, 0.0, 0.1, 0.0], name="abcd"), lr=0.01, **FORMS[form]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: 1.0 if epoch < 3 else 0.5
    )  # made before: it holds the step that it found
    seen = Seen(optimizer)
    optimizer.step()
    assert seen.last == [1, 2, 3, 4]
    undo = merge(optimizer)
    optimizer.step()
    assert seen.last == [4, 6]
    optimizer.param_groups[2]["lr"] = 0.02
    optimizer.step()
    assert seen.last == [1, 3, 6]
    scheduler.step()
    optimizer.param_groups[2]["lr"] = optimizer.param_groups[0]["lr"]
    optimizer.step()
    assert seen.last == [4, 6]
    assert [group["name"] for group in optimizer.param_groups] == list("abcd")
    undo()
    optimizer.step()
    assert seen.last == [1, 2, 3, 4]


def test_hooks_and_failures_see_the_groups_of_the_script():
    optimizer = torch.optim.SGD(groups_of([1, 1, 1]), lr=0.1)
    own, found = optimizer.param_groups, []
    optimizer.register_step_pre_hook(lambda *_: found.append(optimizer.param_groups is own))
    optimizer.register_step_post_hook(lambda *_: found.append(optimizer.param_groups is own))
    handle = register_optimizer_step_post_hook(lambda *_: found.append(optimizer.param_groups is own))
    undo = merge(optimizer)
    try:
        optimizer.step()
        own[1]["lr"] = "nothing like it"
        with pytest.raises(TypeError):
            optimizer.step()
    finally:
        handle.remove()
        undo()
    assert optimizer.param_groups is own
    assert found == [True, True, True, True]


def test_no_patch_remains_when_the_last_of_several_is_removed():
    """Adam and AdamW share one step; the patches are removed in the order in which they were applied."""
    first, second = (kind(groups_of([1, 1]), lr=0.1) for kind in (torch.optim.Adam, torch.optim.AdamW))
    func = torch.optim.Adam.step.__code__.co_freevars.index("func")
    cell = torch.optim.Adam.step.__closure__[func]
    really, undo = cell.cell_contents, [merge(first), merge(second)]
    seen = Seen(second)
    assert cell.cell_contents is not really
    undo[0]()
    second.step()
    assert seen.last == [2]
    undo[1]()
    assert cell.cell_contents is really


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_parameter_that_is_thawed_inside_a_group_joins_a_fused_update(kind):
    """Fused SGD updates parameters with and without a momentum in two calls; torch itself would end the
    program.
    """
    options = {"momentum": 0.9} if kind == "SGD" else {}
    made = []
    for lever in (False, True):
        torch.manual_seed(0)
        optimizer = getattr(torch.optim, kind)(groups_of([3]), lr=0.1, **options)
        parameters = optimizer.param_groups[0]["params"]
        parameters[0].grad = None
        optimizer.step()
        if lever:
            LEVER.apply(context(optimizer), "fused", Ledger())
        for _ in range(3):
            parameters[0].grad = torch.ones(3, 2)
            optimizer.step()
        made.append([p.detach() for p in parameters])
    for plain, fused in zip(*made, strict=True):
        torch.testing.assert_close(plain, fused)


def test_sparse_and_dense_gradients_are_updated_apart():
    optimizer = torch.optim.SGD([*groups_of([1, 1]), *sparse(groups_of([1]))], lr=0.1)
    seen = Seen(optimizer)
    undo = merge(optimizer)
    optimizer.step()
    undo()
    assert seen.last == [1, 2]


def test_grad_scaler_of_a_fused_optimizer():
    """A GradScaler passes its scale to a fused update, which unscales, or skips the step where numbers are
    infinite.
    """
    made = []
    for merging in (False, True):
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(groups_of([1, 2, 1]), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        undo = merge(optimizer) if merging else None
        for worst in (1.0, float("inf"), 1.0):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.full((3, 2), 64.0) * worst
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
        if undo is not None:
            undo()
        made.append(
            [p.tolist() for group in optimizer.param_groups for p in group["params"]]
            + [float(scaler.get_scale())]
        )
    assert made[0] == made[1]


# -- messages of the lever ---------------------------------------------------------------------------------------------------


def test_it_is_offered_alone_where_the_form_is_the_scripts_own():
    optimizer = torch.optim.AdamW(groups_of([1, 1]), lr=0.1, fused=True)
    answer = LEVER.applies(Facts(), context(optimizer))
    assert answer == Options(("merged",), effect=Effect.EXACT)
    optimizer.param_groups[1]["lr"] = 0.2
    answer = LEVER.applies(Facts(), context(optimizer))
    assert isinstance(answer, Skip)
    assert answer.reason == "the program creates its AdamW with fused=True"


def test_other_optimizers_are_left_alone():
    optimizer = type("Own", (torch.optim.SGD,), {})(groups_of([1, 1]), lr=0.1)
    assert isinstance(LEVER.applies(Facts(), context(optimizer)), Skip)
    with pytest.raises(LookupError, match="merged implementation"):
        merge(optimizer)


def test_a_closure_that_is_called_several_times_sees_the_groups_of_the_script():
    optimizer = torch.optim.LBFGS(groups_of([2]), max_iter=4)
    own, found = optimizer.param_groups, []

    def closure():
        found.append(optimizer.param_groups is own)
        loss = sum(p.square().sum() for p in own[0]["params"])
        optimizer.zero_grad()
        loss.backward()
        return loss

    undo = merge(optimizer)
    optimizer.step(closure)
    undo()
    assert len(found) > 1
    assert all(found)


def test_an_optimizer_whose_step_the_compiler_has_wrapped(monkeypatch):
    """This is what the compiler, once imported, does to the steps that it cannot compile."""
    optimizer = torch.optim.RAdam(groups_of([1, 1]), foreach=True)
    monkeypatch.setattr(torch.optim.RAdam, "step", torch.compiler.disable(torch.optim.RAdam.step))
    assert LEVER.applies(Facts(), context(optimizer)) == Options(("merged",), effect=Effect.EXACT)
    seen = Seen(optimizer)
    undo = merge(optimizer)
    optimizer.step()
    undo()
    assert seen.last == [2]


def test_fused_merges_too():
    optimizer = torch.optim.Adam(groups_of([1, 2]), lr=0.1)
    seen = Seen(optimizer)
    undo = LEVER.apply(context(optimizer), "fused", Ledger())
    optimizer.step()
    undo()
    optimizer.step()
    assert seen.updates == [[3], [1, 2]]
