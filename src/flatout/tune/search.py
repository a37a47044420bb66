"""The search: observe, explore, check a step, confirm in fresh processes.

observe    run one plain program until its steps are steady; every lever says whether it applies
ranks      with several ranks: compare them with one process
by name    measure levers that you named although they change training: speed and both loss curves
explore    measure all levers by an experimental design: live ones by block, others across processes
fit        if memory is limited: add memory-saving levers one after another, by time and peak memory
guard      replay one step plainly, with the levers, and in float64
confirm    run two or three fresh pairs of processes, plain and tuned, each with its own seed; more if the
           result is unclear. They alone decide the speed, and provide the loss curves of the guard
"""

from flatout.measure.clock import seconds
from flatout.schema.errors import FlatoutError, NothingMeasured
from flatout.schema.plan import Plan
from flatout.schema.records import TrialRecord
from flatout.schema.session import NamedLeverRecord, ProgramFigures, SessionRecord
from flatout.trial.blocks import PREFETCHED_BATCHES, LeverFailed
from flatout.trial.parent import ProgramGone
from flatout.tune.budget import LONGER_BUDGET_S
from flatout.tune.candidates import drop_slow_fetches, make_candidates
from flatout.tune.comparison import compare_running
from flatout.tune.conclude import noise_floor
from flatout.tune.confirm import confirm_plan
from flatout.tune.endings import end_reason, failure_error
from flatout.tune.explore import explore
from flatout.tune.interleaver import RunningCandidate, ask_options
from flatout.tune.memory_fit import fit_memory
from flatout.tune.narrow import check_step
from flatout.tune.plan_files import sources_key
from flatout.tune.ranks import compare_with_one_process, why_incompatible
from flatout.tune.tuning import Tuning

# Measures levers that you name and the tuner never selects, because they change training.
#
# It records the speed and both loss curves. Both programs start from the same seed and alternate block by
# block, so speed and losses come from the same steps.

BUDGET_SHARE = 0.4  # of the budget, for all of them
SEED = 0


def measure_named(tuning: Tuning) -> None:
    """Fill ``session.named``. A lever that fails gets a sentence there, and the search continues."""
    measured_plans = {record.plan for record in tuning.session.named_levers}
    pending = [choice for choice in tuning.goal.named if choice.text not in measured_plans]
    for choice in pending:
        plan, start_s = Plan((choice,)), seconds()
        record = NamedLeverRecord(plan.describe())
        tuning.stage("by name", f"{record.plan} against the plain program")
        candidates: list[RunningCandidate] = []
        try:
            for side_plan in (Plan(), plan):
                candidates.append(tuning.start_paused(side_plan, SEED))
            plain, named = (candidate.trial for candidate in candidates)
            until_s = seconds() + max(
                BUDGET_SHARE * tuning.budget_s / len(pending) - (seconds() - start_s),
                4 * tuning.interleaver.block_s,
            )
            record.ratio = compare_running(tuning.interleaver, plain, named, until_s)
            records = plain.finish(), named.finish()
            record.plain_losses, record.losses = (
                [float.fromhex(loss) for loss in record.losses] for record in records
            )
        except (ProgramGone, LeverFailed) as error:
            record.why_not = end_reason(error)
        finally:
            for candidate in candidates:
                tuning.interleaver.dismiss(candidate.trial)
        tuning.session.named_levers.append(record)
        tuning.record_comparison(record.plan, "by name", record.ratio, record.why_not, start_s)


MIN_TICKS = 12  # a program with fewer steps cannot be compared
MAX_FETCH_SHARE = 0.15  # of the budget, for fetching a whole data set first


def search(tuning: Tuning) -> SessionRecord:
    """Run the whole search.

    Raises ProgramFailed if the plain program is seen to fail, before or after it trained, and NothingMeasured
    if it does not train.
    """
    try:
        tuning.disturbance.wait(tuning.budget_s, tuning.watcher.report)
        observe(tuning)
        compare_with_one_process(tuning)
        measure_named(tuning)
        tuned, replica = check_step(tuning, fit_memory(tuning, explore(tuning)))
        tuning.finish_plain_trial()
        confirm_plan(tuning, tuned, replica)
        if tuning.counted_blocks:
            tuning.session.noise_floor = noise_floor(tuning)
        tuning.session.disturbance = tuning.disturbance.beside
    finally:
        tuning.interleaver.close()
        tuning.explain_overrun()
        tuning.save()
    return tuning.session


def observe(tuning: Tuning) -> None:
    """Bring the plain program to its steady state and query every lever. Raises what ``search`` raises."""
    tuning.stage("observing", "the plain program, until its steps are steady")
    try:
        budget_s = tuning.goal.budget_s or LONGER_BUDGET_S
        timeout_s = max(min(60.0, 3 * budget_s), 0.8 * budget_s)
        plain = tuning.interleaver.start_paused(Plan(), 0, timeout_s)
        answer = ask_options(plain.trial)
    except ProgramGone as gone:
        raise _unobservable_error(tuning, gone.record) from None
    ready, interleaver = plain.trial.ready, tuning.interleaver
    for skipped in ready["skipped"]:  # levers that every program of the search needs
        raise NothingMeasured(f"{skipped['name']} could not be applied: {skipped['reason']}")
    tuning.plain_trial, tuning.start_cost_s, tuning.warmup_ticks = (
        plain.trial,
        plain.startup_s,
        ready["ticks"],
    )
    interleaver.tick_ms, interleaver.unit = max(ready["tick_ms"], 1e-3), ready["unit"]
    tuning.max_copies = ready["max_copies"]
    tuning.session.context = context = answer["context"]
    tuning.session.key["sources"] = sources_key(context.pop("sources"))
    interleaver.prefetched_ticks = PREFETCHED_BATCHES * max(
        (loader["num_workers"] for loader in answer["context"]["loaders"]), default=0
    )
    tuning.candidates = make_candidates(
        answer["options"],
        tuning.goal.effects,
        tuning.goal.only_levers,
        tuning.goal.memory_limit_bytes is not None,
        tuning.base,
        why_incompatible,
    )
    ranks = tuning.session.ranks
    tuning.disturbance.observe(context, ranks.procs if ranks else 1)
    tuning.choose_budget()
    drop_slow_fetches(
        tuning.candidates, answer["context"]["loaders"], ready, MAX_FETCH_SHARE * tuning.budget_s
    )
    tuning.session.baseline = ProgramFigures(
        step_ms=ready["tick_ms"], unit=ready["unit"], warmup_ms=ready["warmup_ms"]
    )
    tuning.save()


def _unobservable_error(tuning: Tuning, record: TrialRecord) -> FlatoutError:
    if record.status == "failed":
        return failure_error(
            record, f"the program fails before flatout changes anything (exit code {record.exit_code})"
        )
    if record.status == "unattached":
        return NothingMeasured(f"nothing to tune: {record.reason}. The program was not changed.")
    if record.status == "broken":
        return NothingMeasured(
            f"flatout could not analyse this program and did not change it. Please report this:\n\n{record.reason.strip()}"
        )
    if record.status == "hung":
        return NothingMeasured(
            f"the program did not train: {record.reason}. Increase --budget, or see the logs in {tuning.job.trials}."
        )
    steps = len(set(record.loss_steps))
    end = (
        f"it ended after {steps} training {'step' if steps == 1 else 'steps'}"
        if steps
        else "it ended without a training step"
    )
    return NothingMeasured(
        f"nothing to tune: {end}, and a comparison needs at least {MIN_TICKS}. Run more training steps while tuning."
    )
