"""Rules for the source, checked in every file: dependencies between packages, owners of side effects, light
imports.

The rules are functions over one source text, so that each is also shown a source that breaks it.
"""

import ast
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from limits import hang_s

ROOT = Path(__file__).parents[1]
HOME = ROOT / "src" / "flatout"
FILES = sorted(path.relative_to(HOME).as_posix() for path in HOME.rglob("*.py"))

NUMBER = {
    "schema": 0,
    "job": 1,
    "data": 2,
    "distributed": 2,
    "kernels": 2,
    "measure": 2,
    "probe": 2,
    "render": 2,
    "export": 3,
    "launch": 3,
    "levers": 3,
    "agent": 4,
    "checkpoint": 5,
    "guard": 5,
    "trial": 6,
    "diagnose": 7,
    "tune": 7,
    "compare": 8,
    "cli": 9,
    "loop": 9,
    "integrations": 9,
}
MAY_IMPORT = {
    "schema": set(),
    "job": {"schema"},
    "data": set(),
    "kernels": set(),
    "distributed": {"schema", "job"},
    "measure": {"schema", "job"},
    "probe": {"schema", "job"},
    "render": {"schema", "job"},
    "export": {"schema", "measure"},
    "launch": {"schema", "job", "measure"},
    "levers": {"schema", "job", "data", "distributed", "kernels"},
    "agent": {"schema", "job", "distributed", "levers", "measure", "render"},
    "checkpoint": {"schema", "job", "agent", "data", "measure"},
    "guard": {"schema", "agent", "measure"},
    "trial": {"schema", "job", "agent", "data", "distributed", "guard", "launch", "measure"},
    "diagnose": {"schema", "job", "agent", "guard", "launch", "measure", "probe", "trial"},
    "tune": {"schema", "job", "guard", "launch", "levers", "measure", "probe", "trial"},
    "compare": {"schema", "job", "guard", "launch", "measure", "probe", "trial", "tune"},
    "loop": set(NUMBER) - {"loop", "cli", "compare", "integrations"},
    "cli": set(NUMBER) - {"loop", "cli", "integrations"},
    "integrations": {"schema"},
}
# Imports allowed while a file loads, in addition to the standard library. Everything else is imported inside
# a function.
HEAVY_AT_TOP = {
    "tune": {"numpy"},
    "kernels": {"torch", "triton"},
    "data": {"torch"},
    "launch": {"psutil"},
    "checkpoint/resume": {"torch"},
    "cli": {"click", "rich"},
    "integrations": {"pytest"},
    "render": {"rich", "markupsafe"},
}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "core", "manager"}

MAY_PATCH = {"agent/ledger.py", "job/streams.py"}  # the second opens streams of its own process, for good
MAY_SET_OWN = {"schema/records.py"}  # setattr on its own record
MAY_READ_CLOCKS = {"measure/clock.py"}
CLOCKS = {"time", "timeit", "datetime"}
STARTERS = {"subprocess", "pty", "multiprocessing", "pexpect"}
STARTING_CALLS = ("exec", "fork", "spawn", "posix_spawn", "system", "popen")
LOUD_CALLS = {"print", "exit", "quit", "sys.exit", "click.echo", "click.secho"}
LOUD_STREAMS = {"sys.stderr.write", "sys.stdout.write", "sys.__stderr__.write", "sys.__stdout__.write"}
MAY_WRITE = {  # programs of their own, which are no commands
    "agent/bootstrap.py",
    "agent/site/sitecustomize.py",
    "launch/local_launcher.py",
    "export/trackers.py",
    "launch/supervisor.py",
}
MAY_WRITE_OUT = {"integrations/notebook.py"}


def package_of(name):
    return name.split("/")[0] if "/" in name else ""


def may_start_processes(name):
    return package_of(name) in ("launch", "trial") or name in (
        "cli/run.py",
        "cli/options/exports.py",
        "job/interpreter.py",
        "probe/gpus.py",
        "compare/sides.py",  # git
        "integrations/flatout_command.py",  # the flatout command
    )


def imported(tree, name):
    """Line, dotted module and whether it is loaded with the file: every import statement, and import_module
    of a constant.
    """
    top = {id(node) for statement in tree.body for node in _outside_functions(statement)}  # type: ignore[attr-defined]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = ["flatout", *name.split("/")[:-1]]
                module = ".".join([*package[: len(package) - node.level + 1], *filter(None, [module])])
            whole = [f"{module}.{alias.name}" for alias in node.names] if module == "flatout" else [module]
            found += [(node.lineno, each, id(node) in top) for each in whole]
        elif (
            isinstance(node, ast.Call)
            and spelled_out(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
        ):
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append((node.lineno, first.value, False))
    return found


def _outside_functions(node):
    """The nodes that run when the file is loaded."""
    found = [node]
    if isinstance(node, ast.If) and spelled_out(node.test).endswith("TYPE_CHECKING"):
        return found
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            found += _outside_functions(child)
    return [] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else found


def spelled_out(node):
    """``a.b.c`` for a chain of names, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = spelled_out(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def arrows(name, source):
    """The other packages that a file imports."""
    modules = [module.split(".") for _, module, _ in imported(ast.parse(source), name)]
    return {
        parts[1] for parts in modules if parts[0] == "flatout" and len(parts) > 1 and parts[1] in NUMBER
    } - {package_of(name)}


def complaints(name, source):
    """All violations of the rules in a file called ``name`` (its path below the root package)."""
    tree, room = ast.parse(source), package_of(name)
    found = []
    if room and room not in NUMBER:
        found.append(f"{name}: {room} is not a package of flatout")
    stem = Path(name).stem
    if stem in FORBIDDEN_NAMES:
        found.append(
            f"{name}: a file is not called {stem}; put the shared function into the package it is about"
        )
    found += _import_complaints(name, room, tree)
    bound = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += _call_complaints(name, room, node)
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, (ast.AugAssign, ast.AnnAssign))
            else []
        )
        for target in targets:
            owner = spelled_out(target).split(".")[0] if isinstance(target, ast.Attribute) else ""
            if owner and (owner in bound or owner == "torch") and name not in MAY_PATCH:
                found.append(
                    f"{name}:{target.lineno}: {spelled_out(target)} is assigned; foreign objects change through the ledger alone"
                )
    return found


def _import_complaints(name, room, tree):
    found = []
    for line, module, at_top in imported(tree, name):
        parts = module.split(".")
        if parts[0] == "flatout":
            other = parts[1] if len(parts) > 1 else ""
            if other not in NUMBER or other == room or not room:
                continue
            if NUMBER[other] >= NUMBER.get(room, 9):
                found.append(
                    f"{name}:{line}: {room} ({NUMBER.get(room)}) imports {other} ({NUMBER[other]}); arrows only point down"
                )
            elif other not in MAY_IMPORT[room]:
                found.append(f"{name}:{line}: {room} may not import {other}")
        else:
            heavy = HEAVY_AT_TOP.get(room, set()) | HEAVY_AT_TOP.get(name.rpartition("/")[0], set())
            if at_top and parts[0] not in sys.stdlib_module_names and parts[0] not in heavy:
                found.append(
                    f"{name}:{line}: {parts[0]} is imported at the top; {room or 'this file'} must load without it"
                )
            if parts[0] in CLOCKS and name not in MAY_READ_CLOCKS:
                found.append(f"{name}:{line}: {parts[0]} is imported; the clocks are in measure/clock.py")
            if parts[0] in STARTERS and not may_start_processes(name):
                found.append(
                    f"{name}:{line}: {parts[0]} is imported; processes are started in launch/ and trial/"
                )
            if room == "render" and parts[0] == "torch":
                found.append(f"{name}:{line}: a view needs no torch")
    return found


def _call_complaints(name, room, node):
    spelled = spelled_out(node.func)
    if spelled in LOUD_CALLS and room != "cli":
        return [f"{name}:{node.lineno}: {spelled}() is called; only cli/ prints or exits"]
    if (
        spelled in LOUD_STREAMS
        and room != "cli"
        and not (name in MAY_WRITE and ".stderr" in spelled)
        and name not in MAY_WRITE_OUT
    ):
        return [f"{name}:{node.lineno}: {spelled}() is called; only cli/ prints"]
    if spelled in ("setattr", "delattr", "object.__setattr__") and name not in MAY_PATCH | MAY_SET_OWN:
        return [
            f"{name}:{node.lineno}: {spelled}() is called; foreign objects change through the ledger alone"
        ]
    if spelled.startswith("os.") and spelled[3:].startswith(STARTING_CALLS) and not may_start_processes(name):
        return [f"{name}:{node.lineno}: {spelled}() is called; processes are started in launch/ and trial/"]
    return []


def cycles(graph):
    """A path from a name to itself; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_package_was_found():
    assert {"__init__.py", "schema/plan.py", "agent/ledger.py", "cli/main.py"} <= set(FILES)
    assert len(FILES) > 40


def test_every_file_keeps_the_rules():
    assert [
        line for name in FILES for line in complaints(name, (HOME / name).read_text(encoding="utf-8"))
    ] == []


def test_no_cycles_between_packages():
    graph = {}
    for name in FILES:
        if package_of(name):
            graph.setdefault(package_of(name), set()).update(
                arrows(name, (HOME / name).read_text(encoding="utf-8"))
            )
    assert cycles(graph) == []


def test_no_package_hides_in_a_single_file():
    """Below the root package there are packages, `__init__.py` and `__main__.py`, nothing else."""
    assert {path.name for path in HOME.iterdir() if path.suffix == ".py"} == {"__init__.py", "__main__.py"}
    rooms = {path.name for path in HOME.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(NUMBER)


def imports(name, source):
    """The files that a file imports at any time, for type checking too."""
    tree = ast.parse(source)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flatout."):
            path = "/".join((node.module or "").split(".")[1:])
            found |= {f"{path}.py"} | {f"{path}/{alias.name}.py" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {"/".join(alias.name.split(".")[1:]) + ".py" for alias in node.names}
    return found & set(FILES)


def test_no_file_imports_itself_in_a_circle():
    # probe/ reads programs as text in walks that call one another; its types are one circle
    names = [name for name in FILES if package_of(name) != "probe"]
    graph = {name: imports(name, (HOME / name).read_text(encoding="utf-8")) for name in names}
    assert cycles(graph) == []


LONGEST_FILE, LONGEST_FUNCTION = 500, 60


def sizes(name, source):
    """Files and functions that are too long. Signature and docstring of a function do not count."""
    found = []
    if (lines := source.count("\n")) > LONGEST_FILE:
        found.append(f"{name}: {lines} lines; split it at a concept, at most {LONGEST_FILE}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > LONGEST_FUNCTION:
                found.append(f"{name}: {node.name} has {lines} lines, at most {LONGEST_FUNCTION}")
    return found


def test_files_and_functions_are_short():
    assert [line for name in FILES for line in sizes(name, (HOME / name).read_text(encoding="utf-8"))] == []


def test_long_files_and_functions_are_found():
    function = "def f():\n" + '    "A docstring."\n' * 1 + "    x = 1\n" * (LONGEST_FUNCTION + 1)
    assert sizes("a.py", function) == [
        f"a.py: f has {LONGEST_FUNCTION + 1} lines, at most {LONGEST_FUNCTION}"
    ]
    assert len(sizes("a.py", "x = 1\n" * (LONGEST_FILE + 1))) == 1
    assert imports("cli/run.py", "def f():\n    from flatout.cli import tune") == {"cli/tune.py"}
    guarded = "if TYPE_CHECKING:\n    from flatout.cli.tune import tune"
    assert imports("cli/run.py", guarded) == {"cli/tune.py"}


def over_budget(page, files):
    """By how many bytes the files exceed the limit that the page names."""
    (limit,) = re.findall(r"has at most ([\d,]+) bytes", page)
    return max(0, sum(files.values()) - int(limit.replace(",", "")))


def test_the_source_keeps_its_budget():
    files = {name: (HOME / name).stat().st_size for name in FILES}
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    assert over_budget(page, files) == 0, "less code, or a reason beside the number in architecture.md"
    assert over_budget(page, {**files, "another.py": 10_000_000}) > 6_000_000


@pytest.mark.processes
def test_each_break_of_the_list_is_one_of_this_source():
    """`bench/mutants.py` breaks the source and looks whether a test turns red."""
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "mutants.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def first_lines(room):
    """The paragraphs of a package's docstring that begin with a word and a colon."""
    text = ast.get_docstring(ast.parse((HOME / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    return {
        paragraph.partition(":")[0]: " ".join(paragraph.partition(":")[2].split())
        for paragraph in text.replace("\nImports:", "\n\nImports:")
        .replace("\nStart with:", "\n\nStart with:")
        .split("\n\n")
    }


@pytest.mark.parametrize("room", sorted(NUMBER))
def test_a_package_says_who_runs_it_and_what_it_imports(room):
    lines = first_lines(room)
    assert lines.get("Runs in"), room
    assert lines.get("Start with"), room
    allowed = MAY_IMPORT[room]
    named = {word for word in re.findall(r"\w+", lines["Imports"]) if word in NUMBER}
    if lines["Imports"].startswith("all packages but"):
        named = set(NUMBER) - named - {room}
    assert named == allowed, (room, lines["Imports"])


def test_the_table_of_packages_is_true():
    """docs/explanation/architecture.md lists every package with its number and what it may import."""
    page = ROOT / "docs" / "explanation" / "architecture.md"
    rows = {
        cells[1].strip("`"): cells
        for line in page.read_text(encoding="utf-8").splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 5 and cells[0].isdigit()
    }
    assert set(rows) == set(NUMBER)
    for room, (number, _, _, _, allowed) in rows.items():
        named = set(re.findall(r"`(\w+)`", allowed))
        if allowed.startswith("all but"):
            named = set(NUMBER) - named - {room}
        assert (int(number), named & set(NUMBER)) == (NUMBER[room], MAY_IMPORT[room]), room


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("schema/plan.py", "from flatout.levers import TABLE", "arrows only point down"),
        ("schema/plan.py", "def f():\n    from flatout.levers import TABLE", "arrows only point down"),
        ("schema/plan.py", "import flatout.cli.main", "arrows only point down"),
        ("schema/plan.py", "from ..cli import main", "arrows only point down"),
        ("schema/plan.py", "from flatout import cli", "arrows only point down"),
        (
            "schema/plan.py",
            "import importlib\nimportlib.import_module('flatout.trial.parent')",
            "arrows only point down",
        ),
        (
            "measure/phases.py",
            "from flatout.agent.training_context import TrainingContext",
            "arrows only point down",
        ),
        ("levers/tf32.py", "from flatout.agent.ledger import Ledger", "arrows only point down"),
        ("levers/tf32.py", "from flatout.measure.clock import seconds", "may not import"),
        ("tune/search.py", "from flatout.render import summary", "may not import"),
        ("guard/verdict.py", "import torch", "must load without it"),
        ("levers/tf32.py", "if True:\n    import torch", "must load without it"),
        ("levers/tf32.py", "class A:\n    import torch", "must load without it"),
        ("schema/plan.py", "import tomlkit", "must load without it"),
        ("__init__.py", "import torch", "must load without it"),
        ("trial/parent.py", "import time", "the clocks are in"),
        ("trial/parent.py", "def f():\n    from time import monotonic", "the clocks are in"),
        ("tune/search.py", "import datetime", "the clocks are in"),
        ("probe/machine.py", "import subprocess", "processes are started in"),
        ("cli/tune.py", "import os\nos.execvp('a', [])", "processes are started in"),
        ("guard/replica.py", "import os\nos.fork()", "processes are started in"),
        ("probe/machine.py", "import os\nos.popen('nvidia-smi')", "processes are started in"),
        ("levers/tf32.py", "def apply():\n    print('hello')", "only cli/ prints"),
        ("tune/search.py", "import sys\nsys.exit(1)", "only cli/ prints or exits"),
        ("render/terminal.py", "import click\nclick.echo('x')", "only cli/ prints or exits"),
        ("agent/training_context.py", "import sys\nsys.stderr.write('x')", "only cli/ prints"),
        ("agent/bootstrap.py", "import sys\nsys.stdout.write('x')", "only cli/ prints"),
        ("launch/local_launcher.py", "print('x')", "only cli/ prints"),
        (
            "levers/tf32.py",
            "def apply(torch):\n    torch.backends.cudnn.allow_tf32 = True",
            "through the ledger alone",
        ),
        ("trial/worker.py", "import sys\nsys.excepthook = None", "through the ledger alone"),
        (
            "levers/tf32.py",
            "def apply(flags):\n    setattr(flags, 'fp32_precision', 'tf32')",
            "through the ledger alone",
        ),
        (
            "levers/tf32.py",
            "undo = lambda flags: setattr(flags, 'fp32_precision', 'tf32')",
            "through the ledger alone",
        ),
        ("render/summary.py", "def f():\n    import torch", "a view needs no torch"),
        ("guard/utils.py", "", "a file is not called utils"),
        ("schema/base.py", "", "a file is not called base"),
        ("tools/new.py", "", "not a package of flatout"),
    ],
)
def test_a_broken_rule_is_detected(name, source, words):
    found = complaints(name, source)
    assert any(words in complaint for complaint in found), found


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("guard/verdict.py", "def f():\n    import torch"),
        ("guard/verdict.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("kernels/softmax.py", "import torch"),
        ("measure/clock.py", "import time"),
        ("launch/process.py", "import subprocess"),
        ("cli/run.py", "import os\nos.execvpe('a', [], {})"),
        ("cli/main.py", "import sys, click\nsys.exit(0)\nclick.echo('x')\nprint('x')"),
        ("agent/ledger.py", "setattr(object(), 'a', 1)"),
        ("agent/bootstrap.py", "import sys\nsys.stderr.write('x')"),
        ("launch/local_launcher.py", "import sys\nsys.stderr.write('x')"),
        (
            "trial/worker.py",
            "from flatout.agent.applier import Applier\nfrom flatout.schema.plan import Plan",
        ),
        ("trial/worker.py", "class A:\n    def __init__(self):\n        self.x = 1"),
    ],
)
def test_allowed_sources_pass(name, source):
    assert complaints(name, source) == []


def test_a_cycle_is_detected():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    "code",
    [
        "import flatout",
        "import sys; sys.argv = ['flatout', '--help']\nfrom flatout.cli.main import main\ntry:\n    main()\nexcept SystemExit:\n    pass",
        "from flatout.probe.machine import look; look()",
        "import flatout.levers, flatout.tune.search, flatout.trial.parent",
    ],
    ids=["import", "help", "look", "search"],
)
def test_torch_is_not_loaded(code):
    numpy_too = set() if "flatout.tune.search" in code else {"numpy"}  # the regression of a search needs it
    code += f"\nimport sys\nheavy = {{'torch', 'markupsafe', 'tomlkit'}} | {numpy_too!r}\nassert not heavy & set(sys.modules), heavy"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=hang_s(60),
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr
