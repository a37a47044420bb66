"""`flatout scale`: how a program would do on many devices, foretold from what it does on one."""

from __future__ import annotations

from pathlib import Path

import click

from flatout.cli.arguments import PROGRAM, Duration, writable
from flatout.cli.asking import Asked, header, question
from flatout.diagnose.profiling import Profiling, Wishes
from flatout.measure.clock import seconds
from flatout.measure.links import Fabric
from flatout.measure.scaling import FIXED_SHARE, Work, evenly, predict, scaled
from flatout.plan.errors import NothingMeasured, UsageError
from flatout.plan.folder import JobFolder, read_json
from flatout.plan.plan import Choice, Plan
from flatout.plan.profile import ProfileRecord
from flatout.plan.records import PHASES, PhaseTime
from flatout.plan.scale import STRATEGIES, Link, ScaleRecord, Timing, read_devices, read_link
from flatout.probe.machine import look
from flatout.trial.blocks import Watcher
from flatout.trial.parent import Trial, measure

STEPS = 40
# What neighbours cost beside the bytes: ResNet-50 takes 97 ms on one V100 and 103 on two, whose gradients need 0.9 ms (pytorch, benchmarks/distributed/ddp).
# bench/scaling.py shows what it foretells of all other runs.
OVERHEAD = 0.062


NOT_OF_ITS_FORM = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError)  # what a foreign profile may raise


class Share(click.ParamType):
    """``6%``, ``0.06``: a share from 0 up to 1."""

    name = "share"

    def convert(self, value: object, param: object, ctx: object) -> float:
        text = str(value).strip()
        try:
            number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number <= 1:
            self.fail(f"{value!r} is no share; write 6% or 0.06")
        return number


@click.command(context_settings=PROGRAM)
@click.option("--gpus", default="1..64", show_default=True, help="Numbers of devices: 8, or 1,2,4, or 8..1024, which doubles.")
@click.option("--network", required=True, help="What joins them: ib-ndr, ethernet-25g, nvlink4, ... or bandwidth=100Gb/s,latency=5us. A wrong name lists all.")
@click.option("--inside", default=None, help="What joins the devices of one node, as nvlink4; then --network joins the nodes.")
@click.option("--node", default=8, show_default=True, type=click.IntRange(1), help="Devices a node, where --inside is given.")
@click.option("--scaling", default="weak", show_default=True, type=click.Choice(["weak", "strong"]),
              help="weak: each device has the program's batch. strong: all together have it.")
@click.option("--strategies", default="ddp,fsdp,hybrid,local", show_default=True, help="Which ways to train; local changes what is learned.")
@click.option("--local-steps", default=16, show_default=True, type=click.IntRange(1), help="Steps between two averages, of local SGD.")
@click.option("--compute-scale", default=1.0, show_default=True, type=click.FloatRange(0, min_open=True),
              help="How many times faster than the measured device the others are.")
@click.option("--fixed", default=None, type=Share(), help="What a step costs however small its batch, as a share; else measured at half the batch (strong).")
@click.option("--overhead", default=None, type=Share(), help="What neighbours cost beside the bytes, as a share of computing.  [default: 6.2%; on a CPU 0]")
@click.option("--from", "profile", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Use this profile.json; nothing is run.")
@click.option("--second", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A profile.json at another batch size, for strong scaling.")
@click.option("--budget", default="2m", show_default=True, type=Duration(), help="The longest that measuring may take, once steps are steady.")
@question
def command(gpus: str, network: str, inside: str | None, node: int, scaling: str, strategies: str, local_steps: int, compute_scale: float,
            fixed: float | None, overhead: float | None, profile: Path | None, second: Path | None, budget: float, job: Path | None, as_json: bool,
            words: tuple[str, ...]) -> int:
    """Foretell how long a step of a program takes on many devices, and what would bound it there.

    The program is measured on one device, as it is, and stopped; or a profile of it is used. The rest is computed: buckets of gradients, what of them
    hides behind the backward pass, and a model of the links. The picture is scale.html in the job's folder.
    """
    devices, ways = read_devices(gpus), _strategies(strategies)
    between = read_link(network)
    near = read_link(inside, "--inside") if inside is not None else None
    if near is not None and between.inside:
        raise UsageError(f"--network {network} joins the devices of one machine; with --inside, --network is what joins the machines, as ib-ndr.")
    seen = _read_profile(profile) if profile is not None else None
    def run(stage: object, save: object) -> None:
        found = seen if seen is not None else _measured(asked, budget, stage)
        _take(record, found, str(profile) if profile is not None else "")
        if second is not None:
            record.second = timing_of(_read_profile(second))
            if not record.second.samples or record.second.samples == timing_of(found).samples:
                raise UsageError(f"--second {second} says nothing of another batch size. `flatout profile` the program with another one.")
        elif scaling == "strong" and fixed is None and profile is None:
            record.second = _half(asked, found, record, budget, stage)
        record.overhead = overhead if overhead is not None else OVERHEAD if record.device == "cuda" or compute_scale > 1 else 0.0
        _foretell(record, ways, devices, overhead)
        record.status = "done"

    try:
        asked = Asked("scale", words, job) if seen is None or profile is None else OfProfile(seen, profile, job)
        record = ScaleRecord(**asked.header, scaling=scaling, network=between, inside=near, node=node if near is not None else 1, compute_scale=compute_scale,
                             local_steps=local_steps, fixed_share=fixed)
        asked.answer(record, budget, run)
        _show(asked, record, as_json)
    except NOT_OF_ITS_FORM as error:
        if seen is None:
            raise
        raise UsageError(f"{profile} holds values that no profile has ({type(error).__name__}: {str(error)[:200]}). `flatout profile COMMAND...` makes a new "
                         "one.") from None
    return 0


def _show(asked: Asked, record: ScaleRecord, as_json: bool) -> None:
    from flatout.render.scale_page import because, headline, scale_html, scale_table, sentences

    parts = [f"{headline(record)}\n{because(record)}\n", scale_table(record), *sentences(record), *(f"note: {note}" for note in record.notes)]
    asked.show(record, scale_html(record), parts, as_json)


def _strategies(text: str) -> list[str]:
    ways = list(dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip()))
    wrong = [way for way in ways if way not in STRATEGIES]
    if wrong or not ways:
        raise UsageError(f"--strategies {text}: there are {', '.join(STRATEGIES)}.")
    return ways


def _read_profile(path: Path) -> ProfileRecord:
    """Raises UsageError where it is none, or one without steps."""
    data = read_json(path)
    try:
        record = ProfileRecord.from_json(data) if isinstance(data, dict) else None
    except (TypeError, AttributeError, ValueError):
        record = None
    if record is None or not record.step_ms or not record.phases:
        raise UsageError(f"{path} holds no profile with steady steps. `flatout profile COMMAND...` makes one.")
    return record


class OfProfile(Asked):
    """The question as it is asked of a profile: its program need not be here, and the files lie beside it."""

    def __init__(self, seen: ProfileRecord, profile: Path, job: Path | None) -> None:
        self.name, self.facts = "scale", look()
        self.folder = writable(JobFolder(job or profile.resolve().parent), job is not None)
        self.header = {**header(seen.command, self.facts), "cwd": seen.cwd}


class Telling(Watcher):
    def __init__(self, stage: object) -> None:
        self.tell = stage

    def stage(self, name: str, detail: str = "") -> None:
        self.tell(name, detail)  # type: ignore[operator]


def _measured(asked: Asked, budget: float, stage: object) -> ProfileRecord:
    """Quiet steps of the program, nothing else. Raises ProgramFailed, NothingMeasured."""
    record = ProfileRecord(**asked.header)
    wishes = Wishes(STEPS, budget_s=budget, stages=frozenset())
    return Profiling(asked.command, asked.folder, asked.facts, wishes, record, {}, Telling(stage)).run()


def timing_of(profile: ProfileRecord) -> Timing:
    """By the shares of the phases, so that their sum is the step. Raises NothingMeasured where a step is not made of phases."""
    if profile.unit != "step":
        raise NothingMeasured("a step of this program is a closure that lasts seconds (LBFGS): its backward passes cannot be told from its steps.")
    samples = round(profile.samples_per_s * (profile.step_ms or 0.0) / 1000, 6) if profile.samples_per_s else None
    return _timing(profile.phases, profile.step_ms or 0.0, samples, int(profile.scene.get("backwards_per_step") or 1))


def _timing(phases: dict[str, PhaseTime], step_ms: float, samples: float | None, passes: int) -> Timing:
    ms = {name: phases[name].share * step_ms if name in phases else 0.0 for name in PHASES}
    return Timing(ms["forward"], ms["backward"], ms["optimizer"], ms["data"] + ms["copy"] + ms["other"], samples, max(1, passes))


def _take(record: ScaleRecord, profile: ProfileRecord, path: str) -> None:
    """Times and bytes of one device into the record, and what has to be known about them into its notes."""
    record.timing, record.device, record.versions = timing_of(profile), profile.device, profile.versions
    record.tensor_bytes = [int(size) for size in profile.settings.get("gradient_bytes", ())]
    record.parameter_bytes = float(sum(record.tensor_bytes) or sum(profile.settings.get("dtypes", {}).values()))
    if not record.parameter_bytes:
        raise NothingMeasured("this profile does not say how large the parameters are, so there is nothing to communicate. `flatout profile` makes a new one.")
    if not record.tensor_bytes:
        record.notes.append("how large each gradient is was not seen, only their sum: they are taken to become ready evenly")
    record.measured = f"{profile.steps} steps on {profile.device}, {'from ' + path if path else 'measured now'}"
    if record.timing.passes > 1:
        record.notes.append(f"a step has {record.timing.passes} backward passes: DDP is taken to send after the last of them alone (no_sync)")


def _half(asked: Asked, profile: ProfileRecord, record: ScaleRecord, budget: float, stage: object) -> Timing | None:
    """The same program with half its batch, to see how its time answers to it; None, and a note, where that cannot be had."""
    loader = profile.scene.get("training_loader")
    loaders = profile.scene.get("loaders") or []
    size = loaders[loader].get("batch_size") if isinstance(loader, int) and loader < len(loaders) else None
    if not size or size < 2:
        record.notes.append("half the batch could not be measured: the program prepares its batches itself, or has a single sample in each")
        return None
    Telling(stage).stage("measuring", f"half the batch, {size // 2}")
    choice = Choice("batch_size", {"size": size // 2, "loader": loader})
    with Trial(asked.command, asked.folder.new_trial(), Plan((choice,)), asked.facts) as trial:
        half = measure(trial, STEPS, seconds() + 600 + budget)
    if not half.step_ms or not half.phases or not half.samples_per_step or half.skipped:
        record.notes.append(f"half the batch could not be measured: {half.reason or 'the program did not train with it'}")
        return None
    phases = {name: phase if isinstance(phase, PhaseTime) else PhaseTime.from_json(phase) for name, phase in half.phases.items()}
    return _timing(phases, half.step_ms, half.samples_per_step, profile.scene.get("backwards_per_step") or 1)


def _foretell(record: ScaleRecord, ways: list[str], devices: list[int], overhead: float | None) -> None:
    assert record.timing is not None
    assert record.network is not None
    factor = record.compute_scale
    second = scaled(record.second, factor) if record.second is not None else None
    work = Work(scaled(record.timing, factor), tuple(record.tensor_bytes) or evenly(record.parameter_bytes), record.parameter_bytes, second,
                record.fixed_share if record.fixed_share is not None else FIXED_SHARE, record.overhead, record.local_steps)
    if "hybrid" in ways and record.inside is None:
        record.notes.append("hybrid is left out: it shards inside nodes, and without --inside there are none of several devices")
        ways = [way for way in ways if way != "hybrid"]
    record.notes += _assumptions(record, ways, overhead)
    fabric = Fabric(record.network, record.inside, record.node)
    record.points = [predict(work, fabric, way, count, record.scaling) for way in ways for count in devices]


def _assumptions(record: ScaleRecord, ways: list[str], overhead: float | None) -> list[str]:
    """What was said or taken, and not measured."""
    notes = []
    if record.compute_scale != 1.0:
        notes.append(f"--compute-scale {record.compute_scale:g}: forward, backward and optimizer are taken to be {record.compute_scale:g} times faster than "
                     f"measured on {record.device}; nobody has measured that. What the host does keeps its time")
    if record.overhead:
        whence = "as you said" if overhead is not None else "ResNet-50 on 2 V100, PyTorch's own benchmark; --overhead says otherwise"
        notes.append(f"neighbours cost {record.overhead:.1%} of computing beside the bytes: hooks, copies into buckets, the pace of the slowest ({whence})")
    if record.scaling == "strong" and record.second is None:
        share = record.fixed_share if record.fixed_share is not None else FIXED_SHARE
        notes.append(f"{share:.0%} of a step's computing is taken to stay however small the batch; measure another batch size and give it with --second")
    elif record.scaling == "strong" and record.second is not None and record.second.samples:
        notes.append(f"how the time answers to the batch comes from a second one of {record.second.samples:,.0f} samples; beyond the two it is their line")
    if record.inside is None and record.network is not None and not record.network.inside:
        notes.append("each device is taken to be a node of its own; --inside nvlink4 --node 8 says what joins them")
    if "local" in ways:
        notes.append(f"local SGD averages parameters every {record.local_steps} steps: it learns something else than the other ways")
    return [*notes, "links are as their makers and NCCL state them, with nobody else on them"] if not _by_hand(record.network) else notes


def _by_hand(link: Link | None) -> bool:
    return link is not None and "=" in link.name
