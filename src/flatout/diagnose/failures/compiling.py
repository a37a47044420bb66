"""Failures of torch.compile, of compiled extensions, and of `import torch`."""

import re

from flatout.diagnose.kind import Diagnosis, Form, MessageMatch, kind, match_message, pattern_kind, search_log
from flatout.schema.failure import FailureRecord

WHEEL_INDEX = "https://download.pytorch.org/whl/cu128"


@kind("FE100", "recompile-limit")
def recompile_limit(failure: FailureRecord) -> Diagnosis | None:
    """torch.compile recompiles a function too often.

    Why it happens:
        A size or a plain Python number (a step counter, a length) changes in every call, or a list grows.
    How to fix it:
        `torch.compile(f, dynamic=True)` for sizes, `torch._dynamo.mark_dynamic(x, 0)` for one of them, a
        tensor instead of a Python number, or padding to a few sizes.
    Sources:
        https://docs.pytorch.org/docs/stable/compile/programming_model.recompilation.html"""
    match = match_message(
        failure,
        r"(?:Hard failure due to \w+|Dynamo recompile limit exceeded|Dynamo failed to recompile|(?:recompile_limit|cache_size_limit) reached"
        r"|Recompiling function)",
        types=("FailOnRecompileLimitHit", "RecompileLimitExceeded", "RecompileError", "Unsupported"),
    )
    config = search_log(failure, r"torch\._dynamo hit config\.(?P<name>\w+) \((?P<limit>\d+)\)")
    if match is not None and not match.error.type.startswith("torch._dynamo."):
        match = None  # the message alone is too common
    if match is None and (config is None or any(error.type for error in failure.chain)):
        return None
    function = search_log(failure, r"function: '?(?P<function>[\w<>.]+)'? \((?P<place>[^)]*)\)")
    reason = search_log(failure, r"last reason: (?:[\d/]+: )?(?P<reason>.+)")
    limit = f" ({config['name']} = {config['limit']})" if config else ""
    name = f"`{function['function']}`" if function else "a function"
    return Diagnosis(
        f"{name} was recompiled for one input after another until the limit was reached{limit}",
        "torch.compile(f, dynamic=True)                    # for sizes that change\n"
        "torch.tensor(step) instead of step                 # for a Python number that changes in every call\n"
        'TORCH_LOGS="recompiles" python train.py            # shows the reason for each recompilation',
        [f"the last reason: {reason['reason']}"] if reason else [],
    )


no_compiler = pattern_kind(
    "FE102",
    "no-compiler",
    """torch.compile finds no C++ compiler.
    The default backend of torch.compile generates C++ (and for Triton a small C program), and a slim container
    has no compiler.
    https://docs.pytorch.org/docs/stable/torch.compiler.html""",
    Form(
        "torch.compile needs a C++ compiler and finds none[[ (tried {tried})]]",
        "apt-get install -y g++              # or CXX=/path/to/g++\n"
        'torch.compile(f, backend="aot_eager")   # runs without a compiler, but is not faster',
        r"(?:InvalidCxxCompiler: |backend='\w+' raised:\s+(?:InvalidCxxCompiler|RuntimeError): )?No working C\+\+ compiler found in [\w.]+: (?P<tried>[^\n]+)",
        r"(?:RuntimeError: |backend='\w+' raised:\s+RuntimeError: )?Failed to find C compiler\. Please specify via CC environment variable",
        r"(?:InvalidCxxCompiler: )?Compiler: (?P<tried>\S+) is not found\.",
        r"(?:CppCompileError: )?\[Errno 2\] No such file or directory: '(?P<tried>(?:\S*/)?(?:g\+\+|gcc|cc|c\+\+|clang(?:\+\+)?)[^']*)'",
    ),
    types=(
        "RuntimeError",
        "InvalidCxxCompiler",
        "BackendCompilerFailed",
        "InductorError",
        "FileNotFoundError",
    ),
)


REINSTALL = (
    f"pip install --force-reinstall torch torchvision torchaudio --index-url {WHEEL_INDEX}   # one release, together\n"
    "pip install --no-build-isolation --no-cache-dir --force-reinstall {package|EXTENSION}                                      # rebuilds an extension"
)


def _library_and_package(_: FailureRecord, match: MessageMatch) -> dict[str, str]:
    """The library without its folder, and the package that holds it."""
    path = match["library"]
    folder = re.search(r"(?:site|dist)-packages/(\w+)", path)
    package = match["operator"].partition("::")[0] or match["package"] or (folder[1] if folder else "")
    return {"library": path.rpartition("/")[2], "package": package}


extension_does_not_fit = pattern_kind(
    "FE104",
    "extension-does-not-fit",
    """An extension, or a library of CUDA, does not fit this torch.
    torch was updated and torchvision, torchaudio, flash-attn, xformers, apex or a custom extension was not. Or
    a conda and a pip build were mixed. Install the packages of one release together.
    https://github.com/pytorch/vision#installation""",
    Form(
        "{library} was built for another torch (it needs `{symbol}`): the package[[ {package}]] does not fit torch[[ {torch}]]",
        REINSTALL,
        r"(?P<library>[^\s:]+\.(?:so|pyd)[\w.]*): undefined symbol: (?P<symbol>\w*(?:c10|torch|at\d|_ZN|Py|cu[A-Z]|nccl|cudnn)\w*)",
    ),
    Form(
        "{library} needs `{symbol}`, which no loaded library has: it was built against another version of a library",
        "pip install --force-reinstall {package|EXTENSION}",
        r"(?P<library>[^\s:]+\.(?:so|pyd)[\w.]*): undefined symbol: (?P<symbol>\w+)",
    ),
    Form(
        "`{operator}` is missing: the package {package} does not fit torch[[ {torch}]]",
        REINSTALL,
        r"operator (?P<operator>(?:torchvision|torchaudio|torchcodec|torch_\w+|flash_attn|xformers)::\w+) does not exist",
    ),
    Form(
        "{library|a compiled extension} was built for another torch: the package[[ {package}]] does not fit torch[[ {torch}]]",
        REINSTALL,
        r"Couldn't load custom C\+\+ ops\.",
        r"Could not load this library: (?P<library>\S+)",
        r"Detected that PyTorch and (?P<package>torch\w+) were compiled with different CUDA(?: major)? versions",
    ),
    Form(
        "{library} was not found: another package was built with this library of CUDA or torch, or torch's own is missing",
        "pip install --force-reinstall torch torchvision   # installs torch's own CUDA libraries\n"
        "find / -name '{library|lib*.so}*' 2>/dev/null            # is another version of it installed?",
        r"(?P<library>lib(?:cu|nccl|nv|torch|c10)[\w.-]*\.so[\w.]*): cannot open shared object file",
    ),
    types=("ImportError", "OSError", "RuntimeError", "AttributeError"),
    values=_library_and_package,
)


no_torch = pattern_kind(
    "FE106",
    "no-torch",
    """The Python that runs the script has no torch.
    The command started another Python than the one into which torch was installed: the environment is not
    activated, `python` names the system's Python, or torch was never installed here. flatout itself must be
    installed there, too.
    https://docs.python.org/3/library/venv.html#how-venvs-work""",
    Form(
        "the Python that runs this script has no torch",
        "source .venv/bin/activate            # the environment that has torch, then the same command\n"
        ".venv/bin/python train.py            # or name its Python\n"
        "pip install torch flatout             # or install both here",
        r"No module named '(?:torch|torchvision)'",
    ),
    types=("ModuleNotFoundError", "ImportError"),
)

torch_not_loadable = pattern_kind(
    "FE107",
    "torch-not-loadable",
    """The system cannot load torch's libraries.
    The C library or libstdc++ is older than the wheel needs, a file of the installation is damaged, or
    PYTHONPATH leads to the packages of another Python. `flatout doctor` looks at each of them.
    https://pytorch.org/get-started/locally/
    https://docs.python.org/3/using/cmdline.html#envvar-PYTHONPATH""",
    Form(
        "{library} needs glibc {version}, and this system's is older",
        'docker run --rm -it -v "$PWD":/work -w /work pytorch/pytorch bash   # a container brings its own glibc',
        r".{0,200}version [`']GLIBC_(?P<version>[\d.]+)' not found \(required by (?P<library>[^)]+)\)",
    ),
    Form(
        "{library} needs {needed}: the loaded libstdc++ is older than torch needs",
        'echo "$LD_LIBRARY_PATH"   # remove the folder of another libstdc++, but not that of libcuda.so; in conda: conda install -c conda-forge libstdcxx-ng',
        r".{0,200}version [`'](?P<needed>(?:GLIBCXX|CXXABI)_[\d.]+)' not found \(required by (?P<library>[^)]+)\)",
    ),
    Form(
        "{library} is not a complete library",
        "pip install --force-reinstall torch   # or remove its folder, if another one, from LD_LIBRARY_PATH",
        r"(?P<library>\S+): (?:file too short|invalid ELF header|ELF load command|cannot read file data|wrong ELF class)",
    ),
    Form(
        "the torch that Python found was built for another Python, or is its source code",
        "unset PYTHONPATH   # if it leads to the packages of another Python; otherwise pip install --force-reinstall torch",
        r"No module named 'torch\._C'",
        r"Failed to load PyTorch C extensions",
    ),
    types=("ImportError", "OSError", "RuntimeError", "ModuleNotFoundError"),
)
