"""Files that a data set reads as a whole while it makes one sample."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.probe.names import FUNCTIONS
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import argument, flat

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram

# Functions that read a whole file, with the options by which they read a part or map it.
READERS: dict[str, tuple[str, ...]] = {
    "numpy.load": ("mmap_mode",),
    "numpy.loadtxt": ("max_rows",),
    "numpy.genfromtxt": ("max_rows",),
    "numpy.fromfile": ("offset", "count"),
    "torch.load": ("mmap",),
    "safetensors.torch.load_file": (),
    "pickle.load": (),
    "joblib.load": ("mmap_mode",),
    "json.load": (),
    "yaml.load": (),
    "yaml.safe_load": (),
    "scipy.io.loadmat": ("variable_names",),
    "scipy.sparse.load_npz": (),
    "nibabel.load": (),
    "tifffile.imread": ("key",),
    "xarray.load_dataset": (),
    "SimpleITK.ReadImage": (),
    "pandas.read_csv": ("nrows", "chunksize", "iterator", "skiprows"),
    "pandas.read_table": ("nrows", "chunksize", "iterator", "skiprows"),
    "pandas.read_parquet": ("filters", "columns"),
    "pandas.read_pickle": (),
    "pandas.read_json": ("nrows", "chunksize"),
    "pandas.read_excel": ("nrows",),
    "pandas.read_feather": ("columns",),
    "pandas.read_hdf": ("start", "stop", "where"),
}
LAZY = ("nibabel.load",)  # it reads the data only when they are asked for
OPENS = ("open", "gzip.open", "io.open")
JOINS = ("os.path.join", "pathlib.Path", "os.path.expanduser", "os.path.abspath", "str", "Path")

Chain = tuple[tuple[SourceFile, ast.Call], ...]  # calls, each with its file


@dataclass(frozen=True)
class FileRead:
    """A call that reads a whole file for each sample. ``entry`` is the ``__getitem__`` in ``home`` that leads to it.

    ``constant`` is whether its path is the same for all samples.
    """

    home: SourceFile
    entry: ast.FunctionDef | ast.AsyncFunctionDef
    source: SourceFile
    call: ast.expr
    constant: bool
    chain: Chain  # the calls that lead from the entry to its function


def reads_of_samples(program: ScriptProgram) -> Iterator[FileRead]:
    """Yield the whole-file reads that run for every sample of a data set, and are not kept for later ones."""
    for source in program.sources:
        for klass in source.classes:
            if not _is_data_set(program, source, klass):
                continue
            for home, entry in program.methods(source, klass, "__getitem__"):
                assert isinstance(entry, FUNCTIONS)
                yield from _below(program, home, entry, home, entry, ())


def _is_data_set(program: ScriptProgram, source: SourceFile, klass: ast.ClassDef) -> bool:
    """Return whether a class is a data set by its base, or by its name and its length."""
    named = [klass.name, *(ast.unparse(base).rpartition(".")[2] for base in klass.bases)]
    known = any("Dataset" in name or name.endswith(("DataSet", "Folder")) for name in named)
    return known and any(program.methods(source, klass, "__getitem__"))


def _below(
    program: ScriptProgram,
    home: SourceFile,
    entry: ast.FunctionDef | ast.AsyncFunctionDef,
    source: SourceFile,
    function: ast.AST,
    chain: Chain,
) -> Iterator[FileRead]:
    if _decorated(function) or len(chain) > 4:
        return
    for call in _own(function):
        if isinstance(call, ast.Subscript):
            if _whole_of_hdf5(program, source, call):
                yield FileRead(home, entry, source, call, False, chain)
            continue
        if _cached(source, call, function):
            continue
        paths = path_of(source, call)
        if paths is not None:
            yield FileRead(home, entry, source, call, _constant(program, source, paths, chain), chain)
            continue
        for owner, called in program.functions_called(source, call):
            if all(each is not called for each in (function, entry)) and not isinstance(called, ast.Lambda):
                yield from _below(program, home, entry, owner, called, (*chain, (source, call)))


def _own(function: ast.AST) -> Iterator[ast.Call | ast.Subscript]:
    """Yield the calls and subscripts of a function, without those of functions in it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.Call, ast.Subscript)):
            yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def _whole_of_hdf5(program: ScriptProgram, source: SourceFile, node: ast.Subscript) -> bool:
    """Return whether this is ``file["name"][:]`` or ``[()]`` of an HDF5 file: a whole array is read."""
    if ast.unparse(node.slice) not in (":", "()", "...") or not isinstance(node.value, ast.Subscript):
        return False
    root: ast.expr = node.value
    while isinstance(root, ast.Subscript):
        root = root.value
    return any(origin.dotted == "h5py.File" for origin in program.origins(source, root))


def path_of(source: SourceFile, call: ast.Call) -> ast.expr | None:
    """Return the path that a call reads as a whole, or None if it reads no whole file."""
    dotted = source.dotted(call.func)
    if dotted in READERS and call.args:
        if any(keyword.arg is None or keyword.arg in READERS[dotted] for keyword in call.keywords):
            return None
        return opened(source, call.args[0]) or call.args[0]
    if isinstance(call.func, ast.Attribute) and call.func.attr == "readlines" and not call.args:
        return opened(source, call.func.value)
    return None


def opened(source: SourceFile, node: ast.expr) -> ast.expr | None:
    """Return the path of an open file: of ``open(path)`` itself, or of the name that a ``with`` gives it."""
    if isinstance(node, ast.Name):
        bindings = source.names.reaching(node)
        value = bindings[0].value if len(bindings) == 1 and bindings[0].how in ("with", "assign") else None
        return opened(source, value) if isinstance(value, ast.Call) else None
    if isinstance(node, ast.Call) and node.args:
        name = source.dotted(node.func) or getattr(node.func, "id", "")
        return node.args[0] if name in OPENS else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "open":
        return node.func.value
    return None


def _decorated(function: ast.AST) -> bool:
    """Return whether a decorator may keep results: any but those of the language."""
    return any(
        ast.unparse(each).rpartition(".")[2]
        not in ("staticmethod", "classmethod", "property", "override", "no_grad()")
        for each in getattr(function, "decorator_list", [])
    )


def _cached(source: SourceFile, call: ast.Call, function: ast.AST) -> bool:
    """Return whether the result may be kept for later samples, or is read only where none is kept."""
    statement = source.statement(call)
    targets: list[ast.expr] = []
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names = {target.id for target in flat(targets) if isinstance(target, ast.Name)}
    kept = any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in flat(targets))
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(
            isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets
        ):
            inside = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
            kept = kept or bool(names & inside and any(_outlives(target) for target in node.targets))
        if isinstance(node, ast.If) and node.lineno < call.lineno and _asks_for_kept(node.test):
            kept = True
    for above in source.parents(call):
        if above is function:
            break
        if isinstance(above, (ast.ExceptHandler, ast.Lambda)) or (
            isinstance(above, (ast.If, ast.IfExp)) and (_asks_for_kept(above.test) or _rare(above.test))
        ):
            return True
    return kept


def _outlives(target: ast.expr) -> bool:
    while isinstance(target, ast.Subscript):
        target = target.value
    return isinstance(target, ast.Attribute)


def _asks_for_kept(test: ast.expr) -> bool:
    """Return whether a test looks for an earlier result: ``self.data is None``, ``key not in cache``, ``hasattr``."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and any(
            isinstance(op, (ast.In, ast.NotIn, ast.Is, ast.IsNot)) for op in node.ops
        ):
            return True
        if (
            isinstance(node, ast.Compare)
            and any("self." in ast.unparse(each) for each in [node.left, *node.comparators])
            and any(isinstance(op, ast.NotEq) for op in node.ops)
        ):
            return True  # the file that is open is another one
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hasattr":
            return True
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return True
    return any(word in ast.unparse(test).lower() for word in ("cache", "memory", "preload", "loaded"))


def _rare(test: ast.expr) -> bool:
    return any(word in ast.unparse(test).lower() for word in ("debug", "random", "worker"))


def _constant(
    program: ScriptProgram,
    source: SourceFile,
    node: ast.expr,
    chain: Chain,
    depth: int = 0,
) -> bool:
    """Return whether a path is the same for all samples: constants, and attributes that only ``__init__`` sets."""
    if depth > 8:
        return False
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    again = lambda each: _constant(program, source, each, chain, depth + 1)  # noqa: E731
    if isinstance(node, ast.JoinedStr):
        return all(
            again(each.value) if isinstance(each, ast.FormattedValue) else True for each in node.values
        )
    if isinstance(node, ast.BinOp):
        return again(node.left) and again(node.right)
    if isinstance(node, ast.Call):
        name = source.dotted(node.func) or getattr(node.func, "id", "")
        return (
            name in JOINS and bool(node.args) and all(again(each) for each in node.args) and not node.keywords
        )
    if isinstance(node, ast.Attribute):
        return _set_once(program, source, node)
    if not isinstance(node, ast.Name):
        return False
    bindings = source.names.reaching(node)
    if len(bindings) != 1 or bindings[0].path:
        return False
    binding = bindings[0]
    if binding.how == "assign" and binding.value is not None:
        return again(binding.value)
    function = source.function(node)
    if binding.how == "parameter" and function is not None and chain:
        caller, call = chain[-1]
        handed = argument(source, function, binding.node, call)
        return handed is not None and _constant(program, caller, handed, chain[:-1], depth + 1)
    return False


def _set_once(program: ScriptProgram, source: SourceFile, node: ast.Attribute) -> bool:
    """Return whether ``self.path`` or ``self.args.path`` is set only in ``__init__`` or in the body of the class."""
    own = node
    while isinstance(own.value, ast.Attribute):
        own = own.value
    klass = source.klass(node)
    if klass is None or getattr(own.value, "id", "") != "self":
        return False
    found = 0
    names = {f"self.{own.attr}", own.attr, ast.unparse(node)}
    for home, each in program.values.gradient_sources(source, klass):
        for statement in ast.walk(each):
            if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                continue
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if names & {ast.unparse(target) for target in flat(targets)}:  # type: ignore[arg-type]
                function = home.function(statement)
                if function is not None and function.name not in ("__init__", "__post_init__"):
                    return False
                found += function is not None or home.parent(statement) is each
    return found > 0
