"""Let float32 matrix products and convolutions use the TF32 mode of the Tensor Cores.

What it does: torch.set_float32_matmul_precision("high"). Convolutions and RNNs of cuDNN use TF32 by default already.
Why it is faster: TF32 multiplies with 10 bits of mantissa at several times the rate of float32 and adds in float32.
When it does not help: on CPUs, on GPUs before Ampere, and where the model runs in half precision already.
What it can change: products, which have about three decimal digits: as many bits of mantissa as float16, with the range of float32. So its
    effect is that of half precision, and `--effects exact,rounding` leaves it out.
Evidence: a 124M GPT 2.21x (one A100, torch 2.6, LLMs-from-scratch, chapter 5); measured on your program before it is kept.
Sources: PyTorch documentation, "CUDA semantics", section "TensorFloat-32 on Ampere (and later) devices".
"""

from __future__ import annotations

from typing import Any

from flatout.plan.facts import Facts
from flatout.plan.lever import Lever, Options, Skip, Undo, Value
from flatout.plan.words import Effect, Moment


def applies(facts: Facts, scene: Any) -> Options | Skip:
    torch = scene.torch
    device = next((p.device for p in scene.parameters if p.is_cuda), None)
    if scene.device_type != "cuda" and device is None:
        return Skip("no parameter of the program is on a CUDA device")
    if torch.cuda.get_device_capability(device)[0] < 8:
        return Skip("this GPU has no TF32, which needs compute capability 8.0 or higher")
    if torch.are_deterministic_algorithms_enabled():
        return Skip("deterministic algorithms are switched on, so the precision is left as it is")
    return _choice_of_the_script(torch) or Options((True,))


def _choice_of_the_script(torch: Any) -> Skip | None:
    """Either family of flags tells. By default the newer one says "none"; "ieee" was written by somebody."""
    newer = torch.backends.cuda.matmul.fp32_precision
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses where the families disagree
        older = "highest"
    chosen = newer if newer != "none" else older
    return Skip(f"the float32 precision of matrix products is set to {chosen} already") if (newer, older) != ("none", "highest") else None


def apply(scene: Any, value: Value, ledger: Any) -> Undo:
    torch = scene.torch
    # Through the older family of flags, which keeps both in step. With the newer one alone, reading allow_tf32 or
    # get_float32_matmul_precision raises from then on (torch 2.14): in the script, in flex attention, in max-autotune.
    for owner in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        ledger.set_flag(owner, "fp32_precision", owner.fp32_precision)  # undone last: setting "highest" leaves "ieee" behind
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    ledger.call("torch.set_float32_matmul_precision", lambda: torch.set_float32_matmul_precision(before))
    return ledger.restore


def known_bad(scene: Any, value: Value, ledger: Any) -> Undo:
    """Rounds weights to eight bits, once: what a careless precision switch would do."""
    return _eight_bits(scene, ledger)


def _eight_bits(scene: Any, ledger: Any) -> Undo:
    def wrapper(forward: Any) -> Any:
        def rounded(*args: Any, **kwargs: Any) -> Any:
            torch = scene.torch
            with torch.no_grad():
                for root in scene.roots:
                    for p in root.parameters():
                        step = p.abs().max() / 15
                        if step > 0:
                            p.copy_((p / step).round() * step)
            return forward(*args, **kwargs)
        return rounded

    for root in scene.roots:
        scene.wrap_forward(root, wrapper, ledger)
    return ledger.restore


def code(value: Value) -> str:
    return 'torch.set_float32_matmul_precision("high")'


LEVER = Lever("tf32", Moment.MODEL, Effect.PRECISION, applies, code, apply=apply, live=True, known_bad=known_bad,
              half=lambda value: "TF32 products", page=__doc__)
