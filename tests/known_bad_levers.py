"""Levers that are broken on purpose: what a careless implementation could do. The guard must reject each of them.

``KNOWN_BAD`` names the broken version of each lever that acts inside the program. Each is an ``apply``: it takes
the training context, a value of the lever and a ledger, and returns its undo. The tests and the guard's test bed
(bench/guard_levers.py) use them.
"""

from __future__ import annotations

import sys
from functools import wraps
from types import CodeType
from typing import TYPE_CHECKING, Any

from flatout.distributed.division import why_not_split
from flatout.distributed.exchange import Transport
from flatout.levers import attention as attention_lever
from flatout.levers import comm_compression as comm_compression_lever
from flatout.levers import data_parallel as data_parallel_lever
from flatout.levers import ddp_flags as ddp_flags_lever
from flatout.levers import fused_ops as fused_ops_lever
from flatout.levers import gradient_buckets as gradient_buckets_lever
from flatout.levers import inplace as inplace_lever
from flatout.levers import sharding as sharding_lever
from flatout.levers.early.reads import READS

if TYPE_CHECKING:
    pass


def around(context, wrapper, ledger):
    """Wraps the forward pass of each root module."""
    for root in context.roots:
        context.wrap_forward(context.unwrap_ddp(root), wrapper, ledger)
    return ledger.restore


def attention(context, value, ledger):
    """Applies the kernel's default scale on top of the script's scale."""
    functional = context.torch.nn.functional
    really = functional.scaled_dot_product_attention

    def scaled_twice(query, *args, scale=None, **kwargs):
        own = query.shape[-1] ** -0.5
        return really(query, *args, scale=own if scale is None else own * scale, **kwargs)

    attention_lever.apply(context, value, ledger)
    ledger.set(functional, "scaled_dot_product_attention", scaled_twice)
    return ledger.restore


def autocast(context, value, ledger):
    """Scales half-precision gradients and never unscales them."""
    for p in context.parameters:
        ledger.on_restore("gradient hook", p.register_hook(lambda grad: grad * 128).remove)
    return ledger.restore


def batch_size(context, value, ledger):
    """Batches of the requested size that repeat one sample."""

    def change(dataset, arguments):
        from torch.utils.data import default_collate

        collate = arguments.get("collate_fn") or default_collate
        return {**arguments, "collate_fn": lambda samples: collate(samples[:1] * len(samples))}

    context.change_loaders(change, ledger)
    return ledger.restore


def batched_transforms(context, value, ledger):
    """Forgets that images are bytes, so the output is brighter by a constant."""
    from flatout.data.feed import Feed
    from flatout.data.pipelines import INTERCEPTION

    class Brighter(Feed):
        def __getitems__(self, indices):
            batch = super().__getitems__(indices)
            if isinstance(batch, (list, tuple)) and batch[0].is_floating_point():
                batch[0].add_(0.25)
            return batch

    def brighter(loader, asked, feed):
        feed = feed or Brighter(loader)
        feed.batched = True
        return feed

    INTERCEPTION.enable(ledger)
    context.feed_loaders(brighter, ledger)
    return ledger.restore


def channels_last(context, value, ledger):
    """Swaps height and width of the input and never swaps them back."""
    torch = context.torch

    def wrapper(forward):
        def transposed(*args, **kwargs):
            return forward(
                *(a.transpose(-1, -2) if isinstance(a, torch.Tensor) and a.dim() == 4 else a for a in args),
                **kwargs,
            )

        return transposed

    return around(context, wrapper, ledger)


def comm_compression(context, value, ledger):
    """A sum that is not divided by the number of ranks."""
    if why := comm_compression_lever._why_not(context):
        raise LookupError(why)
    transport = NotDivided()
    if context.data_parallel is not None:
        ledger.set(context.data_parallel, "transport", transport)
    for ddp in context.ddp_modules:
        transport.register(context.torch, ddp)
    return ledger.restore


class NotDivided(Transport):
    def hook(self, group=None):
        return None, lambda state, bucket: summed(bucket)


def summed(bucket):
    import torch

    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def compile(context, value, ledger):
    """A "compiled" graph with frozen batch statistics."""

    def wrapper(forward):
        def frozen(*args, **kwargs):
            changed = [m for root in context.roots for m in root.modules() if m.training]
            for m in changed:
                m.training = False
            try:
                return forward(*args, **kwargs)
            finally:
                for m in changed:
                    m.training = True

        return frozen

    return around(context, wrapper, ledger)


def cudnn_benchmark(context, value, ledger):
    """An algorithm that computes convolutions with a two-bit mantissa."""
    torch = context.torch
    plain = torch.nn.functional.conv2d

    def conv2d(*args, **kwargs):
        result = plain(*args, **kwargs)
        return result + (result.detach().to(torch.float8_e5m2).to(result.dtype) - result.detach())

    ledger.set(torch.nn.functional, "conv2d", conv2d)
    return ledger.restore


def data_parallel(context, value, ledger):
    """Exchanges a mean as a sum, or a sum as a mean: a common mistake in scripts parallelised by hand."""
    given = dict(value) if isinstance(value, dict) else {}
    return data_parallel_lever.apply(
        context, {**given, "reduction": "mean" if given.get("reduction") == "sum" else "sum"}, ledger
    )


def ddp_flags(context, value, ledger):
    """Each rank steps with the gradient of its own batch."""
    undo = ddp_flags_lever.apply(context, value, ledger)
    ddp = context.torch.nn.parallel.DistributedDataParallel
    really = ddp.__init__

    @wraps(really)
    def init(self, *args, **kwargs):
        really(self, *args, **kwargs)
        self.require_backward_grad_sync = False

    ledger.set(ddp, "__init__", init)
    return undo


def debug_off(context, value, ledger):
    """Changes one weight by one unit in the last place."""
    torch = context.torch
    with torch.no_grad():
        first = context.parameters[0].view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, float("inf"))))
    return ledger.restore


def device_prefetch(context, value, ledger):
    """Returns the copy of the previous batch."""
    from flatout.data.feed import Feed

    class Late(Feed):
        before: Any = None

        def __getitems__(self, indices):
            batch = super().__getitems__(indices)
            self.before, batch = batch, self.before if self.before is not None else batch
            return batch

    context.feed_loaders(lambda loader, asked, feed: feed or Late(loader), ledger)
    return ledger.restore


def early_values(context, value, ledger):
    """Returns the value that the same place in the program read the time before."""
    kind, before = context.torch.Tensor, dict[tuple[CodeType, int], Any]()

    def late(really):
        @wraps(really)
        def read(tensor, *args, **kwargs):
            caller, found = sys._getframe(1), really(tensor, *args, **kwargs)
            place = caller.f_code, caller.f_lasti
            before[place], found = found, before.get(place, found)
            return found

        return read

    for name in READS:
        ledger.set(kind, name, late(getattr(kind, name)))
    return ledger.restore


def fused_ops(context, value, ledger):
    """The last chunk of rows gives no gradient; normalisations give none through their variance."""
    torch = context.torch

    def without_last_rows(forward):
        def chunked(input):
            output = forward(input)
            rows = output.numel() // output.shape[-1]
            counts = (torch.arange(rows, device=output.device) < rows - rows // 4).view(*output.shape[:-1], 1)
            return torch.where(counts, output, output.detach())

        return chunked

    def half_a_gradient(forward):
        def detached(input):
            return forward(input.detach()) + 0.5 * (input - input.detach())

        return detached

    for head in fused_ops_lever._heads(context):
        context.wrap_forward(head, without_last_rows, ledger)
    for norm in fused_ops_lever._norms(context):
        context.wrap_forward(norm, half_a_gradient, ledger)
    return ledger.restore


def fused_optimizer(context, value, ledger):
    """Doubles the learning rate."""
    for optimizer in context.optimizers:
        for group in optimizer.param_groups:
            ledger.set_item(group, "lr", group["lr"] * 2)
    return ledger.restore


def gc_pause(context, value, ledger):
    """Draws one random number from the program's stream."""
    context.torch.rand(1)
    return ledger.restore


def gradient_buckets(context, value, ledger):
    """Sends the first bucket and forgets the others."""
    if context.data_parallel is None:
        raise LookupError(why_not_split(context.torch))
    transport = FirstBucketAlone(bucket_bytes=gradient_buckets_lever._bytes(value))
    ledger.set(context.data_parallel, "transport", transport)
    return ledger.restore


class FirstBucketAlone(Transport):
    def hook(self, group=None):
        _, plain = super().hook()

        def forgetful(state, bucket):
            mine = bucket.buffer().clone()
            return plain(state, bucket).then(lambda future: mine if bucket.index() else future.value())

        forgetful.__name__ = plain.__name__
        return None, forgetful


def graphs(context, value, ledger):
    """Forgets to copy its inputs, so each pass computes on the first batch of its shape."""
    torch = context.torch

    def wrapper(forward):
        first = {}

        def old(at, given):
            return (
                first.setdefault((at, given.shape), given.detach().clone())
                if isinstance(given, torch.Tensor)
                else given
            )

        def stale(*args, **kwargs):
            return forward(*(old(at, given) for at, given in enumerate(args)), **kwargs)

        return stale

    return around(context, wrapper, ledger)


def inplace(context, value, ledger):
    """Overwrites what the gradient needs: the gradient passes where the activation is zero."""

    def wrapper(forward):
        return lambda input: input + (forward(input.detach()) - input.detach())

    for activation in inplace_lever._activations(context):
        context.wrap_forward(activation, wrapper, ledger)
    return ledger.restore


def loader(context, value, ledger):
    """Normalises with the wrong constant."""

    def change(dataset, arguments):
        from torch.utils.data import default_collate

        collate = arguments.get("collate_fn") or default_collate

        def brighter(samples):
            batch = collate(samples)
            if isinstance(batch, (list, tuple)) and batch[0].is_floating_point():
                batch[0].add_(0.25)
            return batch

        return {**arguments, "collate_fn": brighter}

    context.change_loaders(change, ledger)
    return ledger.restore


def reduced_precision(context, value, ledger):
    """Keeps only three bits of the mantissa of what every layer with weights multiplies."""

    def wrapper(forward):
        def coarse(*args, **kwargs):
            return forward(*(_three_bits(context.torch, a) for a in args), **kwargs)

        return coarse

    for root in context.roots:
        for module in root.modules():
            if any(p.dim() >= 2 for p in module.parameters(recurse=False)):
                context.wrap_forward(module, wrapper, ledger)
    return ledger.restore


def _three_bits(torch, x):
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    mantissa, exponent = torch.frexp(x.detach())
    return x + (torch.ldexp((mantissa * 8).round() / 8, exponent) - x.detach())  # the gradient is that of x


def threads(context, value, ledger):
    """A "race": one parameter receives part of its update from the wrong position."""
    parameter = context.parameters[0]
    hook = parameter.register_hook(lambda grad: grad + 0.3 * grad.flip(0))
    ledger.on_restore("gradient hook", hook.remove)
    return ledger.restore


def recompute(context, value, ledger):
    """Keeps saved tensors in bfloat16."""
    torch = context.torch

    def pack(tensor):
        return (tensor.detach().bfloat16() if tensor.is_floating_point() else tensor.detach()), tensor.dtype

    def wrapper(forward):
        def saving_half(*args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])):
                return forward(*args, **kwargs)

        return saving_half

    return around(context, wrapper, ledger)


def tf32(context, value, ledger):
    """Rounds the weights to four bits."""

    def wrapper(forward):
        def rounded(*args, **kwargs):
            torch = context.torch
            with torch.no_grad():
                for root in context.roots:
                    for p in root.parameters():
                        step = p.abs().max() / 15
                        if step > 0:
                            p.copy_((p / step).round() * step)
            return forward(*args, **kwargs)

        return rounded

    return around(context, wrapper, ledger)


def adjacent_samples(context, value, ledger):
    """Returns the adjacent samples: the cached data, or the resident ones."""
    from flatout.data.feed import Feed

    class Shifted(Feed):
        def __getitems__(self, indices):
            return super().__getitems__([(index + 1) % len(self.dataset) for index in indices])

    context.feed_loaders(lambda loader, asked, feed: feed or Shifted(loader), ledger)
    return ledger.restore


def sharding(context, value, ledger):
    """Adds gradients over the ranks without averaging them."""
    undo = sharding_lever.apply(context, value, ledger)
    sums_gradients(context.data_parallel.sharding)
    return undo


def sums_gradients(sharding):
    groups_of = sharding._groups

    def summed(module):
        groups = groups_of(module)
        for group in groups:
            group.gradient_divide_factor = 1.0
        return groups

    sharding._groups = summed  # type: ignore[method-assign]


KNOWN_BAD = {
    "attention": attention,
    "autocast": autocast,
    "batch_size": batch_size,
    "batched_transforms": batched_transforms,
    "cached_prefix": adjacent_samples,
    "channels_last": channels_last,
    "comm_compression": comm_compression,
    "compile": compile,
    "cudnn_benchmark": cudnn_benchmark,
    "data_parallel": data_parallel,
    "ddp_flags": ddp_flags,
    "debug_off": debug_off,
    "device_prefetch": device_prefetch,
    "early_values": early_values,
    "fused_ops": fused_ops,
    "fused_optimizer": fused_optimizer,
    "gc_pause": gc_pause,
    "gradient_buckets": gradient_buckets,
    "graphs": graphs,
    "inplace": inplace,
    "loader": loader,
    "memory_budget": recompute,
    "recompute": recompute,
    "reduced_precision": reduced_precision,
    "resident_data": adjacent_samples,
    "sharding": sharding,
    "tf32": tf32,
    "threads": threads,
}
