"""A verdict depends on the program, not on its spelling.

With other names, layout and wrapping, the same rules are found.
"""

import ast
import builtins
import string
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.diagnose.check import check
from flatout.diagnose.rules import TABLE
from flatout.probe.program import ScriptProgram

# Comments do not survive rewriting, and one rule is about the top level.
PROGRAMS = [
    (rule.code, kind, rule.section(kind))
    for rule in TABLE
    if rule.check_source is not None
    for kind in ("Bad", "Good")
    if "flatout: ignore" not in rule.section(kind)
]
LETTERS = st.text(string.ascii_lowercase, min_size=3, max_size=9)


def verdict(code):
    return Counter(finding.rule for finding in check(ScriptProgram.of_text(code)))


class Renamed(ast.NodeTransformer):
    """Renames everything that the program defines; imported, inherited and keyword names stay."""

    def __init__(self, tree, fresh):
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        imported = {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}
        given_by = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        given_by |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        given_by |= {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not _is_method(tree, node)
        }
        own = sorted(given_by - imported - set(dir(builtins)) - {"self"})
        self.table = {name: f"{fresh[number % len(fresh)]}_{number}" for number, name in enumerate(own)}

    def visit_Name(self, node):
        return ast.Name(self.table.get(node.id, node.id), node.ctx)

    def visit_arg(self, node):
        return ast.arg(self.table.get(node.arg, node.arg), node.annotation)

    def _named(self, node):
        self.generic_visit(node)
        node.name = self.table.get(node.name, node.name)
        return node

    visit_FunctionDef = visit_ClassDef = _named


def _is_method(tree, function):
    return any(isinstance(klass, ast.ClassDef) and function in klass.body for klass in ast.walk(tree))


def in_a_function(tree, name):
    """Moves everything but the imports and an old guard into a function that a guard calls."""
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    rest = [node for node in tree.body if node not in imports]
    inner = ast.parse(f"def {name}():\n    pass\nif __name__ == '__main__':\n    {name}()")
    inner.body[0].body = rest or inner.body[0].body
    return ast.Module([*imports, *inner.body], [])


def as_a_method(tree, name):
    wrapped = in_a_function(tree, "run")
    function = next(node for node in wrapped.body if isinstance(node, ast.FunctionDef))
    holder = ast.parse(f"class {name.title()}:\n    pass\n{name.title()}().run()")
    function.args.args = [ast.arg("self")]
    holder.body[0].body = [function]
    return ast.Module(
        [node for node in wrapped.body if isinstance(node, (ast.Import, ast.ImportFrom))] + holder.body, []
    )


@given(
    which=st.sampled_from(PROGRAMS),
    names=st.lists(LETTERS, min_size=3, max_size=6, unique=True),
    wrapping=st.sampled_from(["no", "function", "method"]),
)
@settings(max_examples=100)
def test_renamed_and_wrapped(which, names, wrapping):
    code = which[2]
    tree = ast.parse(code)
    tree = Renamed(tree, names).visit(tree)
    if wrapping != "no" and not any(isinstance(node, ast.Global) for node in ast.walk(tree)):
        tree = in_a_function(tree, "outermost") if wrapping == "function" else as_a_method(tree, "outermost")
    expected, got = verdict(code), verdict(ast.unparse(ast.fix_missing_locations(tree)))
    if wrapping != "no":  # a guard or a function fixes exactly this fault
        expected.pop("FL305", None)
        got.pop("FL305", None)
    assert got == expected, ast.unparse(tree)


@given(which=st.sampled_from(PROGRAMS), other=st.sampled_from(PROGRAMS))
@settings(max_examples=60)
def test_two_programs_in_one_file_are_judged_apart(which, other):
    """Each is in its own function: the findings of both together are those of either one."""
    first, second = (
        in_a_function(ast.parse(code), name) for (_, _, code), name in ((which, "one"), (other, "two"))
    )
    both = ast.unparse(ast.Module([*first.body, *second.body], []))
    known = {finding.rule for _, _, code in (which, other) for finding in check(ScriptProgram.of_text(code))}
    known |= {
        "FL101",
        "FL102",
        "FL303",
        "FL313",
    }  # one of the two may use a device or several processes for both
    assert {finding.rule for finding in check(ScriptProgram.of_text(both))} <= known
