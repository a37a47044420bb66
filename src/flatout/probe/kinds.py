"""Kinds of values in training scripts, by the name of the call that creates them."""

WRAPPERS = {
    "torch.compile",
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "torch.jit.script",
    "torch.distributed.fsdp.FullyShardedDataParallel",
}
MAKES_TENSORS = {
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "randint",
    "arange",
    "linspace",
    "eye",
    "tensor",
    "as_tensor",
    "from_numpy",
    "randperm",
    "zeros_like",
    "ones_like",
    "rand_like",
    "randn_like",
    "full_like",
    "empty_like",
    "cat",
    "stack",
    "where",
    "normal",
    "bernoulli",
}
# Methods that return a value of the same kind as their object.
FLUENT = {
    "to",
    "cuda",
    "cpu",
    "train",
    "eval",
    "double",
    "float",
    "half",
    "bfloat16",
    "requires_grad_",
    "apply",
    "share_memory",
    "to_empty",
    "xpu",
    "mps",
}
HINTS = (
    ("Optimizer", ("optimizer", "optim", "opt")),
    ("Scheduler", ("scheduler", "lr_scheduler", "sched")),
    ("GradScaler", ("scaler", "grad_scaler")),
    ("Profiler", ("profiler", "prof")),
    ("Accelerator", ("accelerator",)),
    ("Fabric", ("fabric",)),
)


def kinds_of_name(dotted: str) -> set[str]:
    """Return the kinds of the value that a call of ``dotted`` returns."""
    parts = dotted.split(".")
    last, package = parts[-1], parts[0]
    known = {
        "DataLoader": "DataLoader",
        "GradScaler": "GradScaler",
        "SummaryWriter": "SummaryWriter",
        "ModuleList": "Module",
        "LightningModule": "Module",
    }
    if last in known:
        return {known[last]}
    if dotted in WRAPPERS or (
        package in ("torchvision", "timm", "transformers")
        and ("models" in parts or last in ("create_model", "from_pretrained"))
    ):
        return {"Module"}
    if last.endswith("Sampler"):
        return {"Sampler", last}
    if (package == "torchvision" and "datasets" in parts) or last in (
        "TensorDataset",
        "Dataset",
        "IterableDataset",
        "Subset",
        "ConcatDataset",
    ):
        return {"Dataset", last}
    if package != "torch":
        return _of_a_launcher(package, last)
    if "lr_scheduler" in parts or "swa_utils" in parts:
        return {"Scheduler"} if last.strip("_")[:1].isupper() and last != "AveragedModel" else set()
    if "optim" in parts[1:2] and last[:1].isupper():
        return {"Optimizer"}
    if dotted in ("torch.profiler.profile", "torch.autograd.profiler.profile"):
        return {"Profiler"}
    if parts[1:2] == ["nn"] and last[:1].isupper() and "utils" not in parts:
        return (
            {"Parameter", "Tensor"}
            if last == "Parameter"
            else {"Module", "Loss", last}
            if last.endswith("Loss")
            else {"Module", last}
        )
    if (
        parts[1:3] == ["nn", "functional"]
        or (len(parts) == 2 and last in MAKES_TENSORS)
        or (package == "torch" and len(parts) == 2 and last.islower())
    ):
        return (
            {"Tensor"}
            if last
            not in ("device", "load", "save", "compile", "manual_seed", "dtype", "no_grad", "autocast")
            else set()
        )
    return set()


def _of_a_launcher(package: str, last: str) -> set[str]:
    """Return the kind of what transformers, diffusers, accelerate and Fabric create for a training loop."""
    if package in ("transformers", "diffusers") and last.startswith("get_"):
        return {"Scheduler"} if last.endswith(("scheduler", "schedule", "_warmup")) else set()
    launches = (package == "accelerate" and last == "Accelerator") or (
        package.startswith("lightning") and last == "Fabric"
    )
    return {last} if launches else set()


def called_like(name: str, kind: str) -> bool:
    """Return whether a name is typical for this kind: ``optimizer``, ``optimizerD``, ``grad_scaler``."""
    words = name.lower().strip("_")
    return any(
        hinted == kind
        and any(
            words == word or (words.startswith(word) and len(word) > 3) or words.endswith("_" + word)
            for word in names
        )
        for hinted, names in HINTS
    )
