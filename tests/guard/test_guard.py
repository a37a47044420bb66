"""The judge of records: what it must never accept, what it must never reject, and the reasons it gives."""

import math
import random
import statistics
import struct
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flatout.guard.loss_curves import nonfinite_loss
from flatout.guard.resolution import significant_bits
from flatout.guard.verdict import judge, needs_perturbed_runs, perturbation_for, start_agrees
from flatout.schema.enums import Effect
from flatout.schema.records import TrialRecord

EFFECTS = st.sampled_from([Effect.EXACT, Effect.ROUNDING, Effect.PRECISION, Effect.RESAMPLED])
LOADER = {"loaders": [{"dataset": "D"}]}


def weights(seed, **others):
    """Digests of the weights after some steps; ``s2="other"`` for another one after step 2."""
    return {str(step): others.get(f"s{step}", f"{seed} {step}") for step in (1, 2, 4, 8, 16)}


def record(losses, seed=0, **more):
    return TrialRecord(
        "finished",
        losses=[x.hex() for x in losses],
        loss_steps=list(range(len(losses))),
        seed=seed,
        **{"weights_digests": weights(seed), "batch_statistics": [[0.0, 1.0, 0.5, 0.25]] * 4, **more},
    )


def curve(seed, steps=60, noise=0.1, of=lambda t: 2.0 * 0.97**t):
    draw = random.Random(seed)
    return [of(t) + noise * draw.gauss(0, 1) for t in range(steps)]


def seeds(change=lambda t, x: x, count=3):
    """Runs of one program with several seeds; ``change(step, loss)`` is the effect of a lever after the first
    step.
    """
    return [
        record([x if t == 0 else change(t, x) for t, x in enumerate(curve(seed))], seed)
        for seed in range(count)
    ]


def smooth(error):
    return {
        "checks": [{"name": "gradient", "passed": True, "why": "g", "value": error, "limit": 1.0}],
        "noise": 1.0,
        "smooth": True,
    }


KINKS = {**smooth(1e-7), "smooth": False}


def names(found, passed):
    return {check.name for check in found.checks if check.passed is passed}


# -- laws

finite_losses = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=30)
any_losses = st.lists(st.floats(), min_size=2, max_size=30)


@given(EFFECTS, st.lists(finite_losses, min_size=1, max_size=3))
def test_identical_finite_records_are_always_accepted(effect, curves):
    runs = [record(losses, seed) for seed, losses in enumerate(curves)]
    found = judge(effect, runs, runs)
    if effect is Effect.EXACT and sum(map(len, curves)) < 32:
        assert (found.verdict, "equal bits are claimed from 32" in found.why) == ("not checked", True)
    else:
        assert found.verdict == ("same" if effect is Effect.EXACT else "equivalent")


@given(EFFECTS, st.lists(finite_losses, min_size=1, max_size=3), st.data())
def test_a_loss_that_is_not_finite_where_the_plain_one_is_never_passes(effect, curves, data):
    plain = [record(losses, seed) for seed, losses in enumerate(curves)]
    shortest = min(map(len, curves))
    which, at = data.draw(st.integers(0, len(curves) - 1)), data.draw(st.integers(0, shortest - 1))
    broken = list(curves[which])
    broken[at] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    tuned = [record(broken if seed == which else losses, seed) for seed, losses in enumerate(curves)]
    assert judge(effect, plain, tuned).verdict == "failed"


@given(EFFECTS, any_losses, any_losses)
def test_every_record_gets_a_verdict_and_a_sentence(effect, a, b):
    found = judge(effect, [record(a)], [record(b)])
    assert found.verdict in ("same", "equivalent", "failed", "not checked")
    assert found.why
    assert all(check.why for check in found.checks)


@given(st.lists(finite_losses, min_size=1, max_size=3), st.data())
def test_one_differing_bit_breaks_an_exact_claim(curves, data):
    plain = [record(losses, seed) for seed, losses in enumerate(curves)]
    which, at = (
        data.draw(st.integers(0, len(curves) - 1)),
        data.draw(st.integers(0, min(map(len, curves)) - 1)),
    )
    moved = math.nextafter(curves[which][at], math.inf)
    assume(math.isfinite(moved))
    tuned = [
        record([*losses[:at], moved, *losses[at + 1 :]] if seed == which else losses, seed)
        for seed, losses in enumerate(curves)
    ]
    found = judge(Effect.EXACT, plain, tuned)
    assert found.verdict == "failed"
    assert "losses" in names(found, passed=False)


@given(st.floats(1e-6, 1e6), st.sampled_from([Effect.ROUNDING, Effect.RESAMPLED]))
def test_the_unit_of_the_loss_does_not_matter(unit, effect):
    def verdict(scale):
        def scaled(runs):
            return [record([float.fromhex(x) * scale for x in run.losses], run.seed or 0) for run in runs]

        return judge(effect, scaled(seeds()), scaled(seeds(lambda t, x: x * 1.3))).verdict

    assert verdict(unit) == verdict(1.0)


def test_nothing_to_compare_is_an_error():
    for plain, tuned in (([], []), (seeds(), []), ([], seeds()), (seeds(count=2), seeds(count=3))):
        with pytest.raises(ValueError, match="at least one"):
            judge(Effect.ROUNDING, plain, tuned)


def test_hardly_any_losses_are_not_judged():
    found = judge(Effect.EXACT, [record([1.0])], [record([1.0])])
    assert found.verdict == "not checked"
    assert "too few" in found.why


# -- exact


def test_other_weights_break_an_exact_claim_though_every_loss_agrees():
    tuned = [replace(run, weights_digests=weights(run.seed, s2="other")) for run in seeds()]
    found = judge(Effect.EXACT, seeds(), tuned)
    assert names(found, passed=False) == {"weights"}
    assert "after step 2" in found.why


@pytest.mark.parametrize("recorded", [(), ("1", "2"), ("1", "2", "4", "8"), ("1", "16")])
def test_bits_are_not_claimed_from_too_few_weights(recorded):
    runs = [
        replace(run, weights_digests={step: run.weights_digests[step] for step in recorded})
        for run in seeds()
    ]
    found = judge(Effect.EXACT, runs, runs)
    assert (found.verdict, names(found, passed=None)) == ("not checked", {"weights"})
    assert "equal bits are claimed from 3 and step 16" in found.why


def test_a_claim_of_equal_bits_says_what_was_compared():
    found = judge(Effect.EXACT, seeds(), seeds())
    assert found.why == (
        "bit for bit: 180 losses, and the weights after 5 steps, the last of them step 16 (3 seeds)"
    )


def test_a_nondeterministic_program_gets_a_message_and_is_judged_by_its_curves():
    repeat = record(curve(17))
    found = judge(Effect.EXACT, seeds(), seeds(lambda t, x: x * (1 + 1e-6)), repeats=[repeat])
    assert found.verdict == "equivalent"
    assert "is not repeatable" in found.why
    assert judge(Effect.EXACT, seeds(), seeds(lambda t, x: x + 3.0), repeats=[repeat]).verdict == "failed"


def test_nondeterministic_weights_rule_out_a_bitwise_comparison_even_if_losses_repeat():
    """Atomic additions sum in a different order each time; a loss need not show it at once."""
    repeat = replace(seeds()[0], weights_digests=weights(0, s2="rounded otherwise"))
    tuned = [replace(run, weights_digests=weights(run.seed, s2="and otherwise again")) for run in seeds()]
    found = judge(Effect.EXACT, seeds(), tuned, repeats=[repeat])
    assert found.verdict == "equivalent"
    assert "is not repeatable" in found.why


@pytest.mark.parametrize("seed", range(3))
def test_other_bits_are_held_against_a_second_plain_run_of_the_same_seed(seed):
    """Where a tensor lies in memory may move last bits in one process of ten."""
    plain, usual = seeds(), seeds()
    plain[seed] = replace(
        plain[seed], losses=usual[seed].losses[:20] + record(curve(9)).losses[20:22] + usual[seed].losses[22:]
    )
    blamed = judge(Effect.EXACT, plain, usual)
    assert blamed.verdict == "failed"
    assert (
        f"(seed {seed}; 2 of 60 differ); the weights after 5 steps, the last of them step 16, are"
        in blamed.why
    )
    assert judge(Effect.EXACT, plain, usual, repeats=[plain[seed]]).verdict == "failed"
    excused = judge(Effect.EXACT, plain, usual, repeats=[usual[0], usual[seed]])
    assert excused.verdict == "equivalent"
    assert "is not repeatable even with one seed (loss 20 is" in excused.why


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.02])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_harm_that_a_verdict_names_would_be_found(count, noise):
    plain, draw = seeds(count=count), random.Random(count)

    def verdict(harm):
        tuned = [
            record([float.fromhex(x) + harm + noise * draw.gauss(0, 1) for x in run.losses], run.seed)
            for run in plain
        ]
        return judge(Effect.ROUNDING, plain, tuned, repeats=[record(curve(17))])

    harms = [float(verdict(0.0).why.partition("higher by ")[2].split()[0]) for _ in range(20)]
    assert sum(verdict(1.05 * harm).verdict == "failed" for harm in 5 * harms) >= 90
    assert all(verdict(0.5 * min(harms)).verdict == "equivalent" for _ in range(20))


# -- a program whose own loss is no number


def diverging(change=lambda t, x: x):
    return seeds(lambda t, x: change(t, x) if t < 20 else math.nan)


def test_what_is_nan_on_both_sides_is_not_claimed_to_be_equal():
    assert nonfinite_loss(diverging()[0]) == "the program's own loss is NaN from step 20"
    assert (
        nonfinite_loss(seeds(lambda t, x: math.inf if t == 5 else x)[0]) == ""
    )  # a GradScaler skips such a step
    found = judge(Effect.EXACT, diverging(), diverging())
    assert found.verdict == "same"
    assert "60 losses, and" in found.why
    never = seeds(lambda t, x: math.nan)
    for effect in (Effect.EXACT, Effect.ROUNDING):
        found = judge(effect, never, never, smooth(1e-6))
        assert found.verdict == "not checked"
        assert "only 1 finite losses" in found.why


def test_weights_after_a_nan_prove_nothing():
    """NaN has many bit patterns, and equal ones would prove nothing either."""
    before = {"32": "a NaN"}, {"32": "another NaN"}
    plain, tuned = (
        [replace(run, weights_digests={**weights(run.seed), **after}) for run in diverging()]
        for after in before
    )
    assert judge(Effect.EXACT, plain, tuned).verdict == "same"
    alone = [replace(run, weights_digests={"32": "a NaN"}) for run in diverging()]
    assert judge(Effect.EXACT, alone, alone).verdict == "not checked"


@pytest.mark.parametrize("effect", [Effect.EXACT, Effect.ROUNDING, Effect.RESAMPLED])
def test_a_lever_that_differs_before_the_nan_or_brings_it_fails(effect):
    for plain, tuned in (
        (diverging(), diverging(lambda t, x: x + 50.0)),
        (seeds(), seeds(lambda t, x: math.nan if t > 30 else x)),
    ):
        found = judge(effect, plain, tuned, smooth(1e-6))
        assert found.verdict == "failed"
        assert "nan times" not in found.why


# -- rounding


def test_rounding_that_grows_slowly_passes():
    found = judge(Effect.ROUNDING, seeds(), seeds(lambda t, x: x + 1e-7 * 1.2**t), smooth(1e-6))
    assert found.verdict == "equivalent"
    assert {"start", "curve", "gradient"} <= names(found, passed=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda t, x: x * 64 / 63,  # a mean over n - 1
        lambda t, x: 0.9 * x + 0.23,  # label smoothing
        lambda t, x: x + (0.05 if t > 2 else 0.0),  # a broken step
    ],
)
def test_a_loss_that_is_wrong_from_the_start_fails(change):
    for replica in (None, smooth(1e-6)):
        assert "start" in names(judge(Effect.ROUNDING, seeds(), seeds(change), replica), passed=False)


def test_in_a_smooth_network_the_first_losses_must_be_explained_by_the_gradient():
    small = seeds(lambda t, x: x + 1e-3)
    assert judge(Effect.ROUNDING, seeds(), small, smooth(1e-3)).verdict == "equivalent"
    assert names(judge(Effect.ROUNDING, seeds(), small, smooth(1e-7)), passed=False) == {"start"}
    assert judge(Effect.ROUNDING, seeds(), small, KINKS).verdict == "equivalent"


def chaotic(start, growth=30.0):
    """Rounding that grows to a tenth of the loss within four steps, as a large step on a young network
    causes.
    """
    return lambda t, x: x + 0.3 * math.tanh(start * growth**t / 0.3) * math.sin(37 * t)


def test_chaos_from_the_start_is_measured_by_the_perturbed_program():
    tuned = seeds(chaotic(3e-7))
    assert names(judge(Effect.ROUNDING, seeds(), tuned, KINKS), passed=False) == {"start"}
    perturbed = seeds(chaotic(1e-7))[:2]
    found = judge(Effect.ROUNDING, seeds(), tuned, KINKS, perturbed=perturbed)
    assert found.verdict == "equivalent"
    assert "one rounding" in next(check.why for check in found.checks if check.name == "start")
    # A program that amplifies rounding less, or more slowly, is no excuse.
    for calm in (seeds(), seeds(lambda t, x: x + 1e-7 * 1.2**t), seeds(chaotic(1e-7, growth=4.0))):
        assert names(judge(Effect.ROUNDING, seeds(), tuned, KINKS, perturbed=calm[:2]), passed=False) == {
            "start"
        }


@pytest.mark.parametrize(
    ("effect", "chaos"),
    [(Effect.ROUNDING, chaotic(1e-7)), (Effect.PRECISION, chaotic(1e-4, growth=1.5))],
    ids=["chaos", "half precision"],
)
@pytest.mark.parametrize(
    "change", [lambda t, x: x * 64 / 63, lambda t, x: 0.9 * x + 0.23, lambda t, x: x + 0.02 * t]
)
def test_an_immediate_difference_has_no_excuse(effect, chaos, change):
    found = judge(effect, seeds(), seeds(change), KINKS, perturbed=seeds(chaos)[:2])
    assert "start" in names(found, passed=False)


def test_a_seed_is_compared_with_its_own_perturbed_run():
    """One seed amplifies rounding a hundred times as much as another; a run of a third seed
    excuses nothing.
    """
    tuned = [seeds(chaotic(start))[seed] for seed, start in enumerate((3e-7, 3e-5))]
    plain, perturbed = seeds(count=2), seeds(chaotic(1e-7))
    assert judge(Effect.ROUNDING, plain, tuned, KINKS, perturbed=perturbed[:1]).verdict == "equivalent"
    assert names(judge(Effect.ROUNDING, plain, tuned, KINKS, perturbed=perturbed[1:2]), passed=False) == {
        "start"
    }
    assert names(judge(Effect.ROUNDING, plain, tuned, KINKS, perturbed=perturbed[2:]), passed=False) == {
        "start"
    }


# -- half precision


def bfloat16(x):
    """Rounded to 8 significant bits."""
    return (
        x
        if x == 0 or not math.isfinite(x)
        else math.ldexp(round(math.ldexp(math.frexp(x)[0], 8)), math.frexp(x)[1] - 8)
    )


def float32(x):
    return float(struct.unpack("f", struct.pack("f", x))[0])


@given(st.integers(1, 2**24 - 1), st.integers(-100, 100), st.sampled_from([-1.0, 1.0]))
def test_significant_bits_are_those_of_the_integer_mantissa(mantissa, exponent, sign):
    odd = mantissa
    while odd % 2 == 0:
        odd //= 2
    assert significant_bits(sign * math.ldexp(mantissa, exponent)) == odd.bit_length()


@pytest.mark.parametrize("effect", [Effect.ROUNDING, Effect.PRECISION, Effect.RESAMPLED])
@pytest.mark.parametrize(
    "change",
    [
        lambda t, x: bfloat16(x),
        lambda t, x: bfloat16(x) if t % 3 == 0 else x,  # one of three losses of a step
        lambda t, x: bfloat16(x) / 7,  # divided for accumulation: all bits are set, and values repeat
    ],
)
def test_a_loss_in_half_precision_fails_whatever_the_effect(change, effect):
    long = [record([float32(x) for x in curve(seed, 300, of=lambda t: 1.5)], seed) for seed in range(3)]
    tuned = [
        record([change(t, float.fromhex(x)) for t, x in enumerate(run.losses)], run.seed or 0) for run in long
    ]
    found = judge(effect, long, tuned, perturbed=long[:2])
    assert "resolution" in names(found, passed=False)
    assert "half precision" in found.why


@pytest.mark.parametrize(
    "short",
    [
        lambda x: float(x > 0.5),  # wrong or right
        lambda x: float(round(100 * x)),
        lambda x: round(64 * x) / 64,  # a share of a batch
        lambda x: max(0.0, x - 1.0),  # a margin that is kept, or the loss itself
    ],
)
def test_losses_with_few_bits_in_the_plain_program_may_have_few_bits(short):
    plain = [record([short(x) for x in curve(seed)], seed) for seed in range(3)]
    tuned = [
        record([short(x + 0.004 * (-1) ** t) for t, x in enumerate(curve(seed))], seed) for seed in range(3)
    ]
    assert "resolution" in names(judge(Effect.PRECISION, plain, tuned), passed=True)


def test_the_first_losses_of_half_precision_are_measured_in_its_own_ulp():
    assert perturbation_for(Effect.PRECISION) > 1000 * perturbation_for(Effect.ROUNDING)
    tuned = seeds(chaotic(3e-4))
    found = judge(Effect.PRECISION, seeds(), tuned, KINKS)
    assert needs_perturbed_runs(found)
    assert (
        judge(Effect.PRECISION, seeds(), tuned, KINKS, perturbed=seeds(chaotic(1e-4))[:2]).verdict
        == "equivalent"
    )
    # The program's amplification of float32's last place does not excuse it.
    assert names(
        judge(Effect.PRECISION, seeds(), tuned, KINKS, perturbed=seeds(chaotic(1e-7))[:2]), passed=False
    ) == {"start"}


def rejection(name, why):
    return {"checks": [{"name": name, "passed": False, "why": why, "value": 1.0, "limit": 0.5}]}


def test_a_rejection_by_a_replica_is_final_and_a_late_one_is_called_late():
    early = judge(Effect.ROUNDING, seeds(), seeds(), rejection("update", "the update is off"))
    assert early.verdict == "failed"
    assert "the update is off" in early.why
    wrong = rejection("gradient", "the gradient is gone")
    found = judge(Effect.PRECISION, seeds(), seeds(), smooth(1e-3), late_replica=wrong)
    assert names(found, passed=False) == {"late gradient"}
    assert "after a stretch of training the gradient is gone" in found.why
    slow = {"failure": "it took too long"}
    assert judge(Effect.PRECISION, seeds(), seeds(), smooth(1e-3), late_replica=slow).verdict == "equivalent"


# -- one lever alone


def single_lever(effect, change):
    return start_agrees(effect, seeds()[0], seeds(change)[0], seeds(chaotic(1e-5))[:2])


def test_a_sound_lever_alone_is_not_blamed():
    for effect in (Effect.ROUNDING, Effect.PRECISION):
        found = single_lever(effect, chaotic(5e-5))
        assert found is not None
        assert found.passed
        assert found.name == "start"
    assert single_lever(Effect.EXACT, lambda t, x: x).passed


@pytest.mark.parametrize(
    ("effect", "change", "seen_by"),
    [
        (Effect.ROUNDING, lambda t, x: x * 64 / 63, "start"),
        (Effect.PRECISION, lambda t, x: 0.9 * x + 0.23, "start"),
        (Effect.PRECISION, lambda t, x: bfloat16(x), "resolution"),
        (Effect.PRECISION, lambda t, x: math.nan, "finite"),
        (Effect.EXACT, lambda t, x: x + 1e-9, "losses"),
    ],
)
def test_a_broken_lever_alone_is_blamed(effect, change, seen_by):
    found = single_lever(effect, change)
    assert found is not None
    assert not found.passed
    assert found.name == seen_by


def test_without_evidence_on_one_lever_none_is_blamed():
    plain, wrong = seeds()[0], seeds(lambda t, x: 2 * x)[0]
    perturbed = seeds(chaotic(1e-4))
    assert start_agrees(Effect.RESAMPLED, plain, wrong, perturbed) is None
    assert start_agrees(Effect.PRECISION, plain, wrong) is None
    assert start_agrees(Effect.PRECISION, plain, wrong, perturbed[1:]) is None  # of other seeds
    short = replace(wrong, losses=wrong.losses[:7], loss_steps=wrong.loss_steps[:7])
    assert start_agrees(Effect.PRECISION, plain, short, perturbed) is None
    diverged = record([math.nan, *curve(0)[1:]])
    assert start_agrees(Effect.PRECISION, diverged, wrong, perturbed) is None


@given(any_losses, any_losses, any_losses, EFFECTS)
def test_every_record_of_one_lever_gives_a_check_or_none(a, b, c, effect):
    found = start_agrees(effect, record(a), record(b), [record(c)])
    assert found is None or found.why


def spread_of_the_start():
    """The root mean square, over the first steps, of the standard deviation over the seeds."""
    first = [[float.fromhex(x) for x in run.losses[:9]] for run in seeds()]
    return math.sqrt(sum(statistics.variance(losses) for losses in zip(*first, strict=True)) / 9)


@pytest.mark.parametrize(
    ("replica", "share", "passes"),
    [
        (KINKS, 0.039, True),  # START_LIMIT
        (KINKS, 0.045, False),
        (smooth(1e-4), 0.0029, True),  # ROUNDING_GROWTH times the error of the gradient
        (smooth(1e-4), 0.0035, False),
    ],
)
def test_the_limits_of_the_first_losses(replica, share, passes):
    moved = share * spread_of_the_start()
    tuned = [record([float.fromhex(x) + moved for x in run.losses], run.seed) for run in seeds()]
    check = next(c for c in judge(Effect.ROUNDING, seeds(), tuned, replica).checks if c.name == "start")
    assert (check.passed, check.value) == (passes, pytest.approx(share))


def test_one_seed_is_measured_by_half_of_its_own_movement():
    losses = [3.0, 1.0] * 4
    tuned = [record([x + 0.5 for x in losses])]
    check = next(c for c in judge(Effect.ROUNDING, [record(losses)], tuned).checks if c.name == "curve")
    assert check.value == pytest.approx(2 * 0.5 / 1.0)


def test_the_start_of_a_lever_ends_after_eight_steps():
    late = [record([x + (step > 8) for step, x in enumerate(curve(0))])]
    assert start_agrees(Effect.ROUNDING, seeds()[0], late[0], seeds(chaotic(1e-5))[:1]).passed


def test_resampled_batches_may_differ():
    plain, tuned = (
        [replace(run, context=LOADER, batch_hashes=[f"{side} {run.seed}"]) for run in seeds()]
        for side in "ab"
    )
    assert "batches" not in names(judge(Effect.RESAMPLED, plain, tuned), passed=False)
    assert "batches" in names(judge(Effect.ROUNDING, plain, tuned), passed=False)


def test_a_shift_of_samples_has_the_p_value_of_a_t_test_over_blocks():
    """Of 64 rows each, as mixing changes a whole batch; times the four statistics that are tested."""
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(4)
    shifts = [draw.gauss(0.05, 0.08) for _ in range(10)]
    rows = [[draw.gauss(0, 1) for _ in range(4)] for _ in range(640)]
    moved = [[row[0] + shifts[i // 64], *row[1:]] for i, row in enumerate(rows)]
    plain, tuned = (record(curve(0), batch_statistics=side) for side in (rows, moved))
    check = next(c for c in judge(Effect.RESAMPLED, [plain], [tuned]).checks if c.name == "shift")
    assert check.value == pytest.approx(4 * stats.ttest_1samp(shifts, 0.0).pvalue, rel=0.1)


def test_chaos_after_the_start_is_measured_by_the_seeds():
    def late(t, x):
        return x + (0.1 * math.sin(37 * t) if t > 12 else 0.0)

    assert judge(Effect.ROUNDING, seeds(), seeds(late)).verdict == "equivalent"
    assert "curve" in names(
        judge(Effect.ROUNDING, seeds(), seeds(lambda t, x: x + (0.5 if t > 12 else 0.0))), passed=False
    )


def test_other_batches_fail_where_there_is_a_loader():
    plain = [replace(run, context=LOADER, batch_hashes=["a", "b"]) for run in seeds()]
    tuned = [replace(run, context=LOADER, batch_hashes=["a", "c"]) for run in seeds()]
    found = judge(Effect.ROUNDING, plain, tuned)
    assert names(found, passed=False) == {"batches"}
    assert "batch 1" in found.why


@pytest.mark.parametrize("answer", [{"failure": "no module was called"}, {"checks": []}, {}])
def test_a_replica_without_an_answer_is_no_check(answer):
    found = judge(Effect.ROUNDING, seeds(), seeds(), answer)
    assert (found.verdict, names(found, passed=None)) == ("not checked", {"gradient"})
    assert answer.get("failure", "no answer") in found.why


def test_a_late_replica_without_an_answer_is_said_and_decides_nothing():
    found = judge(Effect.ROUNDING, seeds(), seeds(), smooth(1e-6), late_replica={"failure": "out of memory"})
    assert (found.verdict, names(found, passed=None)) == ("equivalent", {"late gradient"})


def test_another_distribution_is_not_excluded_without_batches():
    runs = [replace(run, batch_statistics=[]) for run in seeds()]
    assert judge(Effect.RESAMPLED, runs, runs).verdict == "not checked"


def test_one_seed_alone_is_measured_by_its_own_movement():
    plain = [record(curve(1))]
    assert judge(Effect.ROUNDING, plain, [record([x + 1e-5 for x in curve(1)])]).verdict == "equivalent"
    assert judge(Effect.ROUNDING, plain, [record([x + 1.0 for x in curve(1)])]).verdict == "failed"


def test_a_loss_that_never_moves_may_not_move_under_levers():
    flat = [record([0.5] * 20, seed) for seed in range(3)]
    assert (
        judge(Effect.ROUNDING, flat, [record([0.5] * 19 + [0.6], seed) for seed in range(3)]).verdict
        == "failed"
    )


def test_a_program_that_diverges_by_itself_is_compared_until_then():
    def run(end, shift=0.0):
        return [record([x + shift for x in curve(seed)] + [end], seed) for seed in range(3)]

    assert judge(Effect.ROUNDING, run(math.nan), run(math.nan)).verdict == "equivalent"
    assert judge(Effect.ROUNDING, run(math.nan), run(1.0)).verdict == "equivalent"
    assert judge(Effect.ROUNDING, run(math.nan), run(math.nan, shift=2.0)).verdict == "failed"


# -- resampled


def samples(seed, draw_seed, flip=True, brighter=0.0, count=640):
    """Statistics of batches, and repeated samples, of a data set with a random flip and a random
    brightness.
    """
    order, draw = random.Random(seed), random.Random(1000 * seed + draw_seed)

    def fetch(sample):
        mean, side = sample.gauss(0, 1), sample.gauss(0, 1)
        return [
            mean + brighter + 0.1 * draw.gauss(0, 1),
            1 + 0.1 * sample.random(),
            side * (draw.choice((-1, 1)) if flip else 1),
            sample.gauss(0, 1),
        ]

    return {
        "context": LOADER,
        "batch_statistics": [fetch(random.Random(order.random())) for _ in range(count)],
        "fetched_samples": [[fetch(random.Random(image)) for image in range(8)] for _ in range(24)],
    }


def resampled(draw_seed, **change):
    return [replace(run, **samples(run.seed or 0, draw_seed, **change)) for run in seeds()]


def test_other_samples_from_the_same_distribution_pass():
    found = judge(Effect.RESAMPLED, resampled(1), resampled(2))
    assert found.verdict == "equivalent"
    assert {"distribution", "shift", "draws"} <= names(found, passed=True)


@pytest.mark.parametrize(
    ("change", "seen_by"),
    [
        ({"brighter": 0.5}, {"distribution", "shift", "draws"}),
        ({"brighter": 0.04}, {"shift"}),  # a constant that is slightly wrong, sample by sample
        ({"flip": False}, {"draws"}),  # a missing flip over a symmetric population
    ],
)
def test_another_distribution_fails(change, seen_by):
    assert names(judge(Effect.RESAMPLED, resampled(1), resampled(2, **change)), passed=False) >= seen_by


def test_a_batch_with_nan_fails():
    """After many batches without one."""
    tuned = resampled(2)
    tuned[-1].batch_statistics[-1][2] = math.nan
    assert "distribution" in names(judge(Effect.RESAMPLED, resampled(1), tuned), passed=False)


def test_a_transform_drawn_once_per_batch_does_not_count_as_many_samples():
    def run(draw_seed):
        found = []
        for plain in seeds():
            draw = random.Random(100 * (plain.seed or 0) + draw_seed)
            mixes = [draw.gauss(0, 1) for _ in range(12)]  # one random number for each batch of 64
            found.append(
                replace(
                    plain,
                    context=LOADER,
                    batch_statistics=[[mixes[at // 64], 1.0, 0.0, 0.0] for at in range(12 * 64)],
                )
            )
        return found

    found = [judge(Effect.RESAMPLED, run(1), run(other)) for other in range(2, 22)]
    assert all("shift" in names(one, passed=True) for one in found)
