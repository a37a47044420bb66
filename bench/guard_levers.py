"""The levers of the guard's test bed: good ones that must be accepted, and broken ones that must be rejected.

Imported inside the measured programs (a trial's ``table`` is "guard_levers:TABLE"). Each entry is an ordinary Lever: it says
where it applies, what it claims to change (its Effect), and how to apply it. A broken one claims what a faulty optimisation
of that kind would claim. The guard sees records and checks only, never a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flatout.levers import TABLE as SHELF
from flatout.plan.lever import Lever, Options, Skip, Undo
from flatout.plan.words import Effect, Moment

OF_SHELF = {lever.name: lever for lever in SHELF}
EXACT, ROUNDING, RESAMPLED = Effect.EXACT, Effect.ROUNDING, Effect.RESAMPLED
When = Callable[[Any], str]  # the reason why a lever does not apply to a Scene, or nothing


# -- where a lever applies ------------------------------------------------------------------------------------------------


def anywhere(scene: Any) -> str:
    return ""


def with_optimizer(scene: Any) -> str:
    return "" if scene.optimizers else "no optimizer object"


def with_group(*keys: str) -> When:
    """Some optimizer has one of these settings switched on."""
    return lambda scene: "" if any(g.get(k) for o in scene.optimizers for g in o.param_groups for k in keys) else f"no optimizer with {keys[0]}"


def with_layer(*names: str) -> When:
    return lambda scene: "" if scene.has_layer(*names) else f"no layer {names[0]}"


def with_weights(count: int) -> When:
    return lambda scene: "" if sum(p.numel() for p in scene.parameters) > count else f"at most {count} parameters"


def without_tokens(scene: Any) -> str:
    """A loss that is the mean over hundreds of tokens does not feel one more or less: 0.1 to 0.3 per cent."""
    return "the loss is a mean over hundreds of tokens" if scene.has_layer("Embedding") else ""


def with_transform(*names: str) -> When:
    """The first data set that was loaded has a list of transforms with one of these. Before there is a loader it cannot be told."""
    def when(scene: Any) -> str:
        seen = scene._loaders._dataset
        held = getattr(getattr(seen() if seen else None, "transform", None), "transforms", ())
        return "" if not scene.steps or any(type(t).__name__.startswith(names) for t in held) else f"no transform {names[0]}"
    return when


def with_images(scene: Any) -> str:
    return with_layer("Conv2d")(scene) if scene.steps else ""


# -- tools ----------------------------------------------------------------------------------------------------------------


def hook_gradients(scene: Any, ledger: Any, change: Callable[[Any], Any], only: slice = slice(None)) -> Undo:
    for p in scene.parameters[only]:
        ledger.call("gradient hook", p.register_hook(change).remove)
    return ledger.restore


def around_step(scene: Any, ledger: Any, make: Callable[[Any, Callable], Callable]) -> Undo:
    for optimizer in scene.optimizers:
        ledger.set(optimizer, "step", make(optimizer, optimizer.step), new=True)
    return ledger.restore


def around_transforms(scene: Any, ledger: Any, change: Callable[[list[Any]], list[Any]]) -> Undo:
    """Change the list of transforms of every data set that a loader is made for."""
    def rule(dataset: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        transform = getattr(dataset, "transform", None)
        if hasattr(transform, "transforms"):
            transform.transforms = change(list(transform.transforms))
        return arguments

    scene.change_loaders(rule, ledger)
    return ledger.restore


def modules(scene: Any, *names: str) -> list[Any]:
    return [m for root in scene.roots for m in root.modules() if type(m).__name__.startswith(names)]


# -- good -----------------------------------------------------------------------------------------------------------------


def bf16_like_noise(scene: Any, value: Any, ledger: Any) -> Undo:
    """Every gradient element off by up to 2^-9 of itself, as bfloat16 rounding would leave it; from a generator of its own."""
    draw = scene.torch.Generator(device=scene.device_type).manual_seed(1)
    torch = scene.torch
    return hook_gradients(scene, ledger, lambda g: g * (1 + (torch.rand(g.shape, generator=draw, device=g.device) * 2 - 1) * 2.0**-9))


def ten_bit_products(scene: Any, value: Any, ledger: Any) -> Undo:
    """What TF32 does to the inputs of linear and convolution layers: ten bits of mantissa."""
    torch = scene.torch

    def rounded(module: Any, args: tuple) -> tuple:
        (x, *rest) = args
        mantissa, exponent = torch.frexp(x.detach())
        return (x + (torch.ldexp((mantissa * 2048).round() / 2048, exponent) - x.detach()), *rest)

    for module in modules(scene, "Linear", "Conv2d"):
        ledger.call("forward hook", module.register_forward_pre_hook(rounded).remove)
    return ledger.restore


def zero_grad_none(scene: Any, value: Any, ledger: Any) -> Undo:
    for optimizer in scene.optimizers:
        zero_grad = optimizer.zero_grad
        ledger.set(optimizer, "zero_grad", lambda *_, zero_grad=zero_grad, **__: zero_grad(set_to_none=True), new=True)
    return ledger.restore


# -- bad: gradients and forward -------------------------------------------------------------------------------------------


def dropout_off(scene: Any, value: Any, ledger: Any) -> Undo:
    for module in modules(scene, "Dropout"):
        ledger.set(module, "p", 0.0)
    for module in modules(scene, "LSTM"):
        ledger.set(module, "dropout", 0.0)
    return ledger.restore


def stale_batchnorm(scene: Any, value: Any, ledger: Any) -> Undo:
    """Running statistics are no longer updated; training itself does not use them."""
    for module in modules(scene, "BatchNorm"):
        ledger.set(module, "momentum", 0.0)
    return ledger.restore


def stale_gradient(scene: Any, value: Any, ledger: Any) -> Undo:
    """Each step uses the gradient of the step before, as a careless overlap would."""
    def make(optimizer: Any, step: Callable) -> Callable:
        held: dict[Any, Any] = {}

        def late(*args: Any, **kwargs: Any) -> Any:
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
                p.grad, held[p] = held.get(p, p.grad), p.grad.clone()
            return step(*args, **kwargs)
        return late
    return around_step(scene, ledger, make)


# -- bad: loss and loop ---------------------------------------------------------------------------------------------------


def label_smoothing(scene: Any, value: Any, ledger: Any) -> Undo:
    functional = scene.torch.nn.functional
    really = functional.cross_entropy
    ledger.set(functional, "cross_entropy", lambda *args, **kwargs: really(*args, **{**kwargs, "label_smoothing": 0.1}))
    return ledger.restore


def off_by_one_mean(scene: Any, value: Any, ledger: Any) -> Undo:
    """The mean over n samples divides by n - 1."""
    functional = scene.torch.nn.functional
    for name in ("cross_entropy", "mse_loss"):
        really = getattr(functional, name)

        def wrong(x: Any, target: Any, *args: Any, really: Any = really, **kwargs: Any) -> Any:
            return really(x, target, *args, **kwargs) * (len(target) / max(1, len(target) - 1))
        ledger.set(functional, name, wrong)
    return ledger.restore


def zero_grad_lost(scene: Any, value: Any, ledger: Any) -> Undo:
    """Every other step starts from the gradients of the one before."""
    for owner in [*scene.optimizers, *scene.roots]:
        calls = [0]

        def sometimes(*args: Any, really: Any = owner.zero_grad, calls: Any = calls, **kwargs: Any) -> None:
            calls[0] += 1
            if calls[0] % 2:
                really(*args, **kwargs)
        ledger.set(owner, "zero_grad", sometimes, new=True)
    return ledger.restore


def clip_lost(scene: Any, value: Any, ledger: Any) -> Undo:
    ledger.set(scene.torch.nn.utils, "clip_grad_norm_", lambda parameters, *args, **kwargs: scene.torch.zeros(()))
    return ledger.restore


# -- bad: optimizer -------------------------------------------------------------------------------------------------------


def skipped_step(every: int) -> Callable[[Any, Any, Any], Undo]:
    def apply(scene: Any, value: Any, ledger: Any) -> Undo:
        def make(optimizer: Any, step: Callable) -> Callable:
            calls = [0]

            def sometimes(*args: Any, **kwargs: Any) -> Any:
                calls[0] += 1
                if calls[0] % every:
                    return step(*args, **kwargs)
                group_lr = [group["lr"] for group in optimizer.param_groups]
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
                result = step(*args, **kwargs)
                for group, lr in zip(optimizer.param_groups, group_lr, strict=True):
                    group["lr"] = lr
                return result
            return sometimes
        return around_step(scene, ledger, make)
    return apply


def state_lost(scene: Any, value: Any, ledger: Any) -> Undo:
    """Momentum and second moments start anew every fifth step."""
    def make(optimizer: Any, step: Callable) -> Callable:
        calls = [0]

        def forgetful(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] % 5 == 0:
                optimizer.state.clear()
            return step(*args, **kwargs)
        return forgetful
    return around_step(scene, ledger, make)


def weight_decay_lost(scene: Any, value: Any, ledger: Any) -> Undo:
    for optimizer in scene.optimizers:
        for group in optimizer.param_groups:
            ledger.set_item(group, "weight_decay", 0.0)
    return ledger.restore


def coarse_weights(coarse: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Undo]:
    """The weights themselves are kept in few bits: small updates are lost."""
    def apply(scene: Any, value: Any, ledger: Any) -> Undo:
        def make(optimizer: Any, step: Callable) -> Callable:
            def rounded(*args: Any, **kwargs: Any) -> Any:
                result = step(*args, **kwargs)
                with scene.torch.no_grad():
                    for p in (p for group in optimizer.param_groups for p in group["params"]):
                        p.copy_(coarse(p))
                return result
            return rounded
        return around_step(scene, ledger, make)
    return apply


def eight_bits(x: Any) -> Any:
    """127 levels and a sign for a whole tensor."""
    step = x.abs().max().clamp_min(1e-30) / 127
    return (x / step).round() * step


# -- bad: data ------------------------------------------------------------------------------------------------------------


def other_constants(scene: Any, value: Any, ledger: Any) -> Undo:
    """Normalize with the constants of another data set (CIFAR-10)."""
    def change(held: list[Any]) -> list[Any]:
        for one in held:
            if type(one).__name__ == "Normalize":
                one.mean, one.std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
        return held
    return around_transforms(scene, ledger, change)


def no_augmentation(scene: Any, value: Any, ledger: Any) -> Undo:
    """Every random transform is left out (a crop with padding becomes none at all)."""
    return around_transforms(scene, ledger, lambda held: [t for t in held if not type(t).__name__.startswith(("Random", "ColorJitter"))])


def always_flipped(scene: Any, value: Any, ledger: Any) -> Undo:
    def change(held: list[Any]) -> list[Any]:
        for one in held:
            if type(one).__name__ == "RandomHorizontalFlip":
                one.p = 1.0
        return held
    return around_transforms(scene, ledger, change)


def no_flip(scene: Any, value: Any, ledger: Any) -> Undo:
    return around_transforms(scene, ledger, lambda held: [t for t in held if type(t).__name__ != "RandomHorizontalFlip"])


def same_crop(scene: Any, value: Any, ledger: Any) -> Undo:
    """The crop is always the corner one: a generator that is never advanced."""
    def change(held: list[Any]) -> list[Any]:
        for one in held:
            if type(one).__name__ == "RandomCrop":
                one.get_params = lambda image, size: (0, 0, *size)
        return held
    return around_transforms(scene, ledger, change)


def kept_too_late(scene: Any, value: Any, ledger: Any) -> Undo:
    """Samples are kept after chance has had its say: the augmentations of the first epoch come again in every later one."""
    class Kept:
        def __init__(self, dataset: Any) -> None:
            self.dataset, self.samples = dataset, {}

        def __len__(self) -> int:
            return len(self.dataset)

        def __getitem__(self, index: int) -> Any:
            if index not in self.samples:
                self.samples[index] = self.dataset[index]
            return self.samples[index]

    scene.change_loaders(lambda dataset, arguments: {**arguments, "dataset": Kept(dataset)}, ledger)
    return ledger.restore


# -- the table ------------------------------------------------------------------------------------------------------------


def _lever(name: str, effect: Effect, apply: Any, when: When = anywhere, moment: Moment = Moment.STEP) -> Lever:
    def applies(facts: Any, scene: Any) -> Options | Skip:
        reason = when(scene)
        return Skip(reason) if reason else Options((True,))

    return Lever(name, moment, effect, applies, lambda value: "", apply=apply, live=moment is not Moment.LOADER, page=(apply.__doc__ or "").strip())


def _bad(of: str, when: When = anywhere) -> Lever:
    """The broken variant that a lever of the shelf brings along, under that lever's claim."""
    lever = OF_SHELF[of]
    effect = RESAMPLED if of == "loader" else lever.effect
    moment = lever.moment if lever.moment is Moment.LOADER else Moment.STEP
    return replace(_lever(f"{of}.known_bad", effect, lever.known_bad, when, moment), live=lever.live)


def _good(of: str, value: Any, when: When = anywhere, name: str = "") -> Lever:
    """A lever of the shelf, tried although it would bring no speed here."""
    def applies(facts: Any, scene: Any) -> Options | Skip:
        reason = when(scene)
        return Skip(reason) if reason else Options((value,))

    return replace(OF_SHELF[of], name=name or of, applies=applies)


def _runs_in_bf16(scene: Any) -> str:
    return "oneDNN has no bfloat16 LSTM on many processors" if scene.has_layer("LSTM") and scene.device_type == "cpu" else ""


GOOD: tuple[Lever, ...] = (
    OF_SHELF["malloc"],
    OF_SHELF["threads"],
    OF_SHELF["gc_pause"],
    _good("debug_off", True),
    OF_SHELF["loader"],
    OF_SHELF["cached_prefix"],
    OF_SHELF["batched_transforms"],
    OF_SHELF["channels_last"],
    _good("autocast", "bfloat16", _runs_in_bf16),
    OF_SHELF["compile"],
    OF_SHELF["fused_ops"],
    _good("recompute", {"ops": "linear", "share": 1.0}),
    _good("inplace", True, with_layer("ReLU")),
    OF_SHELF["fused_optimizer"],
    _good("fused_optimizer", "foreach", with_optimizer, "foreach_optimizer"),
    _lever("zero_grad_none", EXACT, zero_grad_none, with_optimizer),
    _lever("bf16_like_noise", ROUNDING, bf16_like_noise),
    _lever("ten_bit_products", ROUNDING, ten_bit_products),
    _lever("one_ulp_as_rounding", ROUNDING, OF_SHELF["debug_off"].known_bad),
)

BAD: tuple[Lever, ...] = (
    _bad("gc_pause"),  # one random number taken
    _bad("debug_off"),  # one unit in the last place
    _bad("cudnn_benchmark"),  # the last parameter's gradient dropped
    _bad("threads"),  # a race on the first parameter
    _bad("tf32"),  # weights of four bits and a sign
    _bad("reduced_precision", lambda scene: "the inputs are integers" if scene.has_layer("Embedding") else ""),  # inputs of three bits
    _bad("autocast"),  # gradients scaled, never unscaled
    _bad("channels_last", with_images),  # height read as width
    _bad("compile", with_layer("BatchNorm", "Dropout")),  # batch statistics frozen
    _bad("fused_ops", with_layer("Embedding")),  # no gradient from the last rows
    _bad("recompute"),  # what is saved is kept in half of its bits
    _bad("offload"),  # what is saved is read before the last quarter has come back
    _bad("inplace", with_layer("ReLU")),  # the gradient passes where the activation had cut it off
    _bad("fused_optimizer", with_optimizer),  # learning rate doubled
    _bad("loader", with_images),  # images brighter
    _bad("cached_prefix", with_images),  # the neighbour's samples
    _bad("batched_transforms", with_images),  # images brighter
    # Over the ten gradients of the linear model eight bits are as fine as bfloat16.
    _lever("eight_bit_gradients", ROUNDING, lambda scene, value, ledger: hook_gradients(scene, ledger, eight_bits), with_weights(100)),
    _lever("gradients_twice", ROUNDING, lambda scene, value, ledger: hook_gradients(scene, ledger, lambda g: 2 * g)),
    _lever("dropout_off", ROUNDING, dropout_off, with_layer("Dropout")),
    _lever("stale_batchnorm", ROUNDING, stale_batchnorm, with_layer("BatchNorm")),
    _lever("stale_gradient", ROUNDING, stale_gradient, with_optimizer),
    _lever("label_smoothing", ROUNDING, label_smoothing, lambda scene: "" if not scene.has_layer("Linear") or len(scene.parameters) > 2 else "no classes"),
    _lever("off_by_one_mean", ROUNDING, off_by_one_mean, without_tokens),
    _lever("zero_grad_lost", ROUNDING, zero_grad_lost),
    _lever("clip_lost", ROUNDING, clip_lost, lambda scene: "" if scene.has_layer("Embedding") else "nothing is clipped"),
    _lever("step_4_skipped", ROUNDING, skipped_step(4), with_optimizer),
    _lever("step_10_skipped", ROUNDING, skipped_step(10), with_optimizer),
    _lever("state_lost", ROUNDING, state_lost, with_optimizer),
    _lever("weight_decay_lost", ROUNDING, weight_decay_lost, with_group("weight_decay")),
    _lever("bf16_weights", ROUNDING, coarse_weights(lambda p: p.bfloat16()), with_optimizer),
    _lever("eight_bit_weights", ROUNDING, coarse_weights(eight_bits), with_optimizer),
    _lever("other_constants", RESAMPLED, other_constants, with_transform("Normalize"), Moment.LOADER),
    _lever("no_augmentation", RESAMPLED, no_augmentation, with_transform("Random"), Moment.LOADER),
    _lever("no_flip", RESAMPLED, no_flip, with_transform("RandomHorizontalFlip"), Moment.LOADER),
    _lever("always_flipped", RESAMPLED, always_flipped, with_transform("RandomHorizontalFlip"), Moment.LOADER),
    _lever("same_crop", RESAMPLED, same_crop, with_transform("RandomCrop"), Moment.LOADER),
    _lever("kept_too_late", RESAMPLED, kept_too_late, with_transform("Random"), Moment.LOADER),
)

TABLE: tuple[Lever, ...] = (*GOOD, *BAD)
assert len({lever.name for lever in TABLE}) == len(TABLE)  # a Plan names its levers
