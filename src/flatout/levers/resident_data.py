"""Keep the whole data set on the GPU, or in host memory, and make batches on the GPU.

What it does: stores each sample as it is before its random transforms, as `cached_prefix` does, but on the
    GPU. It gathers and transforms batches there. With "host", samples stay in host memory, and the bytes of a
    batch are copied before the transforms. The script receives host tensors that are copied to the host
    when it reads them. When it moves one to the GPU, it gets what is already there.
Why it is faster: even a small GPU makes batches faster than many CPU cores, and the program's thread only
    launches the work.
When it does not help: data sets that do not fit; transforms that need single samples; programs that wait for
    the model anyway.
What it can change: nothing: random numbers are still drawn on the host, in the same order. The first batch is
    computed both ways and compared bit for bit.
Evidence: airbench and similar programs keep CIFAR-10 on the GPU for this reason.
Sources: KellerJordan/cifar10-airbench; torch documentation, "CUDA semantics".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import SWITCH, Lever, Number, Options, Skip, Table, Undo, Value

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

    from flatout.schema.program import Ledger, TrainingContext

MIB = 2**20
MEMORY_DIVISOR = 4  # use at most a quarter of the GPU's or the host's memory


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    gpu = facts.gpu(context.device.index)
    if gpu is None or (context.backwards and context.device_type != "cuda"):
        return Skip("the program does not train on a CUDA device")
    gpu_mib = gpu.memory_bytes // MIB // MEMORY_DIVISOR
    if not context.backwards:  # no loader has been iterated yet; the rule checks each one
        return Options(({"mib": gpu_mib},))
    from flatout.data.feed import Feed, try_feeds
    from flatout.data.keeping import CacheBudget, CacheOptions

    host_mib = facts.memory_bytes // MIB // MEMORY_DIVISOR

    def caching(feed: Feed) -> None:
        feed.batched, feed.cache = True, CacheOptions(CacheBudget(max(gpu_mib, host_mib) * MIB))

    feeds, why = try_feeds(context.training_loaders, caching, type(context.ledger)())
    if why or all(feed.refusal or feed.why_no_cache for feed in feeds):
        return Skip(why or feeds[0].refusal or feeds[0].why_no_cache)
    needed_bytes = sum(feed.store.bytes_of_all for feed in feeds if feed.store is not None)
    needed_mib = max(1, -(-needed_bytes // MIB))
    if needed_mib > max(gpu_mib, host_mib):
        return Skip(
            f"the data needs {needed_mib} MiB, and the limit is {gpu_mib} MiB on the GPU or {host_mib} MiB on the host"
        )
    values: list[Value] = [{"mib": needed_mib}] if needed_mib <= gpu_mib else []
    return Options((*values, {"mib": needed_mib, "host": True}) if needed_mib <= host_mib else tuple(values))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    assert isinstance(value, dict)
    from flatout.data.device import DeviceCopies, ResidentDevice, return_device_copies
    from flatout.data.feed import Feed
    from flatout.data.keeping import CacheBudget, CacheOptions
    from flatout.data.pipelines import INTERCEPTION
    from flatout.data.streams import seeds_itself, without_workers

    torch = context.torch
    if not torch.cuda.is_available():
        raise LookupError("there is no CUDA device to make batches on")
    keep = CacheOptions(CacheBudget(value["mib"] * MIB), eager=True, shared_samples=context.shared_samples)
    return_device_copies(DeviceCopies(), ledger)

    def change(dataset: Dataset, arguments: dict[str, Any]) -> dict[str, Any]:
        return (
            without_workers(arguments)
            if arguments.get("num_workers") and hasattr(dataset, "__getitem__")
            else arguments
        )

    def resident(loader: DataLoader, requested: dict[str, Any], feed: Feed | None) -> Any:
        feed = feed or Feed(loader)
        feed.batched, feed.cache = True, keep
        # The device of the optimizers' weights, or the current device if the script creates them later.
        device = (
            context.device
            if context.device_type == "cuda"
            else torch.device("cuda", torch.cuda.current_device())
        )
        if feed.why_no_cache:
            feed.resident = None
        elif feed.resident is None or feed.resident.device != device:
            feed.resident = ResidentDevice(device, bool(value.get("host")))
        feed.emulated_workers = requested.get("num_workers", 0) if not seeds_itself(loader) else 0
        # "batched" has its own lever: a data set without transforms is resident all the same
        feed.listeners["keep"] = lambda sentence: context.report("resident_data", sentence)
        return feed

    context.change_loaders(change, ledger)
    INTERCEPTION.enable(ledger)
    context.feed_loaders(resident, ledger)
    return ledger.restore


def code(value: Value) -> str:
    return (
        "images, labels = images.cuda(), labels.cuda()  # all of them, as bytes, once\n"
        'for at in torch.randperm(len(images), device="cuda").split(batch_size):\n'
        "    batch = augment(images[at]), labels[at]"
    )


LEVER = Lever(
    "resident_data",
    Moment.LOADER,
    Effect.EXACT,
    applies,
    code,
    apply=apply,
    replaces=("loader",),
    takes_memory="all samples",
    after=("loader", "cached_prefix", "batched_transforms"),
    accepts=(Table({"mib": (Number(1, 2**24),), "host": SWITCH}, ("mib",)),),
    page=__doc__,
)
