"""Disable debugging checks.

What it does: disables anomaly detection, also where the script enables it around each step, and the argument
    checks of torch.distributions. With deterministic algorithms, new memory is no longer filled with NaN.
Why it is faster: anomaly mode stores a traceback for every operation and checks every gradient for NaN. Each
    new distribution compares all its arguments with their constraints, which synchronises a GPU. Filling
    writes all memory once more than the operations do.
When it does not help: a program that uses none of these. Gradchecks stay, because they call the script's
    function, which may draw random numbers.
What it can change: nothing in the results. An invalid argument or a NaN is no longer reported where it
    appears. A program that reads memory before writing it reads arbitrary values.
Evidence: filling took 17 of the 229 ms of a step in a published case (ultralytics).
Sources: torch.autograd.set_detect_anomaly; torch.distributions.Distribution.set_default_validate_args;
    torch.utils.deterministic.
"""

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    torch = context.torch
    checks = context.distributions_seen and torch.distributions.Distribution._validate_args
    filled = (
        torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
    )
    if not torch.is_anomaly_enabled() and not context.anomaly_seen and not checks and not filled:
        unused = "does not check arguments by default" if context.distributions_seen else "is not used"
        return Skip(f"anomaly detection is off, and torch.distributions {unused}")
    return Options((True,))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    torch = context.torch
    anomaly, nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    checks = torch.distributions.Distribution._validate_args

    def undo() -> None:
        torch.autograd.set_detect_anomaly(anomaly, nan)
        torch.distributions.Distribution.set_default_validate_args(checks)

    # Restored in reverse: ``undo`` and disabling anomaly detection need the real function.
    ledger.on_restore("debugging aids", undo)
    torch.autograd.set_detect_anomaly(False)
    # `with detect_anomaly():` would enable it again.
    ledger.set(torch, "set_anomaly_enabled", lambda mode, check_nan=True: None)
    torch.distributions.Distribution.set_default_validate_args(False)
    ledger.set_flag(torch.utils.deterministic, "fill_uninitialized_memory", False)
    return ledger.restore


def code(value: Value) -> str:
    return (
        "torch.autograd.set_detect_anomaly(False); torch.distributions.Distribution.set_default_validate_args(False)\n"
        "torch.utils.deterministic.fill_uninitialized_memory = False"
    )


LEVER = Lever("debug_off", Moment.STEP, Effect.EXACT, applies, code, apply=apply, live=True, page=__doc__)
