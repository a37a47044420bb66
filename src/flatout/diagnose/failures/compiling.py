"""Failures of torch.compile and of compiled extensions."""

from __future__ import annotations

import re

from flatout.diagnose.kind import Diagnosis, kind, match_message, search_log
from flatout.schema.failure import FailureRecord


@kind("FE100", "recompile-limit")
def recompile_limit(failure: FailureRecord) -> Diagnosis | None:
    """torch.compile recompiles a function too often.

    What:
        torch.compile compiled a new version of a function for each of many inputs until it reached its limit.
    Why it happens:
        A size or a plain Python number (a step counter, a length) changes in every call, or a list grows.
    How to fix it:
        `torch.compile(f, dynamic=True)` for sizes, `torch._dynamo.mark_dynamic(x, 0)` for one of them, a
        tensor instead of a Python number, or padding to a few sizes.
    Sources:
        https://docs.pytorch.org/docs/stable/compile/programming_model.recompilation.html
    """
    found = match_message(
        failure,
        ("FailOnRecompileLimitHit", "RecompileLimitExceeded", "RecompileError", "Unsupported"),
        r"(?:Hard failure due to (?P<why>[\w=]+)|Dynamo recompile limit exceeded|Dynamo failed to recompile|(?:recompile_limit|cache_size_limit) reached"
        r"|Recompiling function)",
    )
    info = search_log(failure, r"torch\._dynamo hit config\.(?P<name>\w+) \((?P<limit>\d+)\)")
    if found is not None and not found.thrown.type.startswith(
        "torch._dynamo."
    ):  # the message alone is too common
        found = None
    if found is None and (info is None or any(thrown.type for thrown in failure.chain)):
        return None
    function = search_log(failure, r"function: '?(?P<function>[\w<>.]+)'? \((?P<place>[^)]*)\)")
    reason = search_log(failure, r"last reason: (?:[\d/]+: )?(?P<reason>.+)")
    limit = f" ({info['name']} = {info['limit']})" if info else ""
    evidence = [f"the last reason: {reason['reason']}"] if reason else []
    name = f"`{function['function']}`" if function else "a function"
    return Diagnosis(
        f"{name} was recompiled for one input after another until the limit was reached{limit}",
        "torch.compile(f, dynamic=True)                    # for sizes that change\n"
        "torch.tensor(step) instead of step                 # for a Python number that changes in every call\n"
        'TORCH_LOGS="recompiles" python train.py            # shows the reason for each recompilation',
        evidence,
    )


@kind("FE101", "cannot-be-compiled")
def cannot_be_compiled(failure: FailureRecord) -> Diagnosis | None:
    """torch.compile cannot trace this code.

    What:
        With `fullgraph=True` the whole function must become one graph, and part of it cannot.
    Why it happens:
        A `print`, `.item()`, a branch on a tensor's value, a call into a C library, or an unsupported Python
        feature.
    How to fix it:
        Take it out of the compiled function, or remove `fullgraph=True`: the graph then breaks there and the
        rest stays compiled.
    Sources:
        https://docs.pytorch.org/docs/stable/compile/programming_model.graph_breaks_index.html
    """
    found = match_message(
        failure,
        ("Unsupported", "UserError", "InternalTorchDynamoError", "UncapturedHigherOrderOpError"),
        r"(?P<what>[^\n]+)",
    )
    if (
        found is None
        or not found.thrown.type.startswith("torch._dynamo.")
        or recompile_limit.match(failure) is not None
    ):
        return None
    hint = re.search(r"Hint: (?P<hint>[^\n]+)", found.thrown.message)
    why = re.search(r"Explanation: (?P<why>[^\n]+)", found.thrown.message)
    place = re.search(
        r'from user code:\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)',
        found.thrown.message,
    )
    lines = re.findall(
        r'File "([^"]+)", line (\d+), in (\S+)', found.thrown.message.partition("from user code:")[2]
    )
    where = f" at {lines[-1][0]}:{lines[-1][1]} in {lines[-1][2]}" if place and lines else ""
    return Diagnosis(
        f"torch.compile cannot trace this code{where}: {found['what'][:160]}",
        "torch.compile(f)   # without fullgraph=True: the graph breaks here and the rest stays compiled\n"
        "torch.compiler.disable(the_part)   # or take it out of the compiled function",
        [*([why["why"]] if why else []), *([f"hint: {hint['hint']}"] if hint else [])],
    )


@kind("FE102", "no-compiler")
def no_compiler(failure: FailureRecord) -> Diagnosis | None:
    """torch.compile finds no C++ compiler.

    What:
        The default backend of torch.compile generates C++ (and for Triton a small C program) and needs a
        compiler.
    Why it happens:
        A slim container has none.
    How to fix it:
        `apt-get install g++` (or `CXX=/path/to/g++`). Without a compiler, `torch.compile(f,
        backend="aot_eager")` runs but is not faster.
    Sources:
        https://docs.pytorch.org/docs/stable/torch.compiler.html
    """
    found = match_message(
        failure,
        ("RuntimeError", "InvalidCxxCompiler", "BackendCompilerFailed", "InductorError", "FileNotFoundError"),
        r"(?:InvalidCxxCompiler: |backend='\w+' raised:\s+(?:InvalidCxxCompiler|RuntimeError): )?No working C\+\+ compiler found in [\w.]+: (?P<tried>[^\n]+)",
        r"(?:RuntimeError: |backend='\w+' raised:\s+RuntimeError: )?Failed to find C compiler\. Please specify via CC environment variable",
        r"(?:InvalidCxxCompiler: )?Compiler: (?P<tried>\S+) is not found\.",
        r"(?:CppCompileError: )?\[Errno 2\] No such file or directory: '(?P<tried>(?:\S*/)?(?:g\+\+|gcc|cc|c\+\+|clang(?:\+\+)?)[^']*)'",
    )
    if found is None:
        return None
    tried = f" (tried {found['tried']})" if found["tried"] else ""
    return Diagnosis(
        f"torch.compile needs a C++ compiler and finds none{tried}",
        'apt-get install -y g++              # or CXX=/path/to/g++\ntorch.compile(f, backend="aot_eager")   # runs without a compiler, but is not faster',
    )


@kind("FE103", "no-triton")
def no_triton(failure: FailureRecord) -> Diagnosis | None:
    """Triton is missing or does not work.

    What:
        torch.compile for a GPU generates Triton kernels, and Triton cannot be imported or does not support
        this GPU.
    Why it happens:
        Triton was not installed with torch (on systems other than Linux), or the GPU is too old (capability
        below 7.0).
    How to fix it:
        Install torch from its own index, which installs the matching Triton. On an old GPU, do not use
        torch.compile.
    Sources:
        https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html
    """
    found = match_message(
        failure,
        (
            "RuntimeError",
            "TritonMissing",
            "BackendCompilerFailed",
            "InductorError",
            "GPUTooOldForTriton",
            "ModuleNotFoundError",
        ),
        r"(?:backend='\w+' raised:\s+)?(?:\w+: )?Cannot find a working triton installation",
        r"(?:backend='\w+' raised:\s+)?(?:\w+: )?Found (?P<gpu>.+?) which is too old to be supported by the triton GPU compiler",
        r"No module named 'triton'",
    )
    if found is None or (
        found.thrown.message.startswith("No module") and found.thrown.frames and found.thrown.frames[-1].mine
    ):
        return None
    if found["gpu"]:
        return Diagnosis(
            f"{found['gpu']} is too old for Triton, and torch.compile needs it on a GPU",
            "run without torch.compile on this GPU (capability 7.0 or newer is needed)",
        )
    return Diagnosis(
        "torch.compile needs Triton on a GPU, and Triton cannot be imported",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128   # installs the matching Triton",
    )


@kind("FE104", "extension-does-not-fit")
def extension_does_not_fit(failure: FailureRecord) -> Diagnosis | None:
    """An extension was built for another torch.

    What:
        A compiled library needs a symbol that this torch does not have, or has under another name.
    Why it happens:
        torch was updated and torchvision, torchaudio, flash-attn, xformers, apex or a custom extension was
        not. Or a conda and a pip build were mixed.
    How to fix it:
        Install the packages of one release together. Rebuild an extension with
        `pip install --no-build-isolation --force-reinstall NAME`.
    Sources:
        https://github.com/pytorch/vision#installation
    """
    found = match_message(
        failure,
        ("ImportError", "OSError", "RuntimeError", "AttributeError"),
        r"(?P<library>[^\s:]+\.(?:so|pyd)[\w.]*): undefined symbol: (?P<symbol>\w+)",
        r"operator (?P<operator>(?:torchvision|torchaudio|torchcodec|torch_\w+|flash_attn|xformers)::\w+) does not exist",
        r"Couldn't load custom C\+\+ ops\.",
        r"Could not load this library: (?P<library>\S+)",
        r"(?P<library>lib(?:cudart|cublas|cudnn|nccl|torch|c10|nvrtc|cusparse|nvJitLink)[\w.-]*\.so[\w.]*): cannot open shared object file",
        r"Detected that PyTorch and (?P<package>torch\w+) were compiled with different CUDA(?: major)? versions",
    )
    if found is None:
        return None
    what = found["operator"] or found["package"] or found["library"].rpartition("/")[2]
    symbol = found["symbol"]
    package = (
        found["operator"].partition("::")[0] or found["package"] or _package(found["library"])
    ) or "EXTENSION"
    if symbol and not re.search(r"c10|torch|at\d|_ZN|Py|cu[A-Z]|nccl|cudnn", symbol):
        return Diagnosis(
            f"{what} needs `{symbol}`, which no loaded library has: it was built against another version of a library",
            f"pip install --force-reinstall {package}",
        )
    if found["library"] and "cannot open" in found.thrown.message:
        return Diagnosis(
            f"{what} is not found: another package was built with this library of CUDA or torch",
            "pip install --force-reinstall torch torchvision   # installs torch's own CUDA libraries\n"
            f"find / -name '{what.partition('.so')[0]}.so*' 2>/dev/null            # is another version of it installed?",
        )
    said = (
        f"`{what}` is missing"
        if found["operator"]
        else f"{what or 'a compiled extension'} was built for another torch"
        + (f" (it needs `{symbol[:80]}`)" if symbol else "")
    )
    version = failure.facts.get("torch", "")
    return Diagnosis(
        f"{said}: the package{'' if package == 'EXTENSION' else f' {package}'} does not fit torch{' ' + version if version else ''}",
        "pip install --force-reinstall torch torchvision torchaudio --index-url https://download.pytorch.org/whl/cu128   # one release, together\n"
        f"pip install --no-build-isolation --no-cache-dir --force-reinstall {package}                                      # rebuilds an extension",
    )


def _package(library: str) -> str:
    found = re.search(r"(?:site|dist)-packages/(\w+)", library)
    return found[1] if found else ""


@kind("FE105", "numpy-does-not-fit")
def numpy_does_not_fit(failure: FailureRecord) -> Diagnosis | None:
    """A module was built for another NumPy, or NumPy is missing.

    What:
        A compiled module was built for another major version of NumPy, or torch finds no NumPy that it can
        use.
    Why it happens:
        NumPy 2 was installed into an environment for NumPy 1, or NumPy is missing.
    How to fix it:
        Update the named module, or run `pip install "numpy<2"`.
    Sources:
        https://numpy.org/doc/stable/numpy_2_0_migration_guide.html
    """
    found = match_message(
        failure,
        ("RuntimeError", "ImportError", "AttributeError", "ValueError"),
        r"Numpy is not available",
        r"\s*A module that was compiled using NumPy 1\.x cannot be run in\s+NumPy (?P<version>[\d.]+)",
        r"numpy\.dtype size changed, may indicate binary incompatibility",
        r"numpy\.core\.multiarray failed to import",
        r"_ARRAY_API not found",
        r"module compiled against (?:API|ABI) version \S+ but this version of numpy is",
    )
    info = search_log(failure, r"A module that was compiled using NumPy 1\.x cannot be run in")
    if found is None and (
        info is None
        or not any("Numpy" in thrown.message or "numpy" in thrown.message for thrown in failure.chain)
    ):
        return None
    return Diagnosis(
        "a compiled module does not fit the installed NumPy"
        if found is None or "not available" not in found.thrown.message
        else "torch finds no NumPy that it can use (none is installed, or one of another major version)",
        'pip install "numpy<2"          # for a module built for NumPy 1\npip install --upgrade numpy     # if NumPy is missing, or torch is newer',
    )


@kind("FE106", "no-torch")
def no_torch(failure: FailureRecord) -> Diagnosis | None:
    """The Python that runs the script has no torch.

    What:
        `import torch` finds no package of this name.
    Why it happens:
        The command started another Python than the one into which torch was installed: the environment is not
        activated, `python` names the system's Python, or torch was never installed here.
    How to fix it:
        Activate the environment, or name its Python in the command. flatout itself must be installed there, too.
    Sources:
        https://docs.python.org/3/library/venv.html#how-venvs-work
    """
    found = match_message(
        failure, ("ModuleNotFoundError", "ImportError"), r"No module named '(?:torch|torchvision)'"
    )
    if found is None:
        return None
    return Diagnosis(
        "the Python that runs this script has no torch",
        "source .venv/bin/activate            # the environment that has torch, then the same command\n"
        ".venv/bin/python train.py            # or name its Python\n"
        "pip install torch flatout             # or install both here",
    )
