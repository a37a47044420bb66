"""The sentences that the source of a lever passes to ``Skip``, read from its syntax tree."""

import ast
import functools
import importlib
import inspect
import re
import textwrap

FROM_THE_PIPELINE = (
    "cached_prefix",
    "batched_transforms",
    "resident_data",
)  # most of their reasons are sentences of flatout.data


@functools.cache
def templates(lever):
    """Regular expressions for all sentences that the source of a lever passes to ``Skip``; placeholders
    become ``.+``.
    """
    module = importlib.import_module(f"flatout.levers.{lever}")
    tree = ast.parse(inspect.getsource(module))
    found = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for call in (
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Skip"
        ):
            try:
                found += sentences(call.args[0], function, module)
            except (AssertionError, AttributeError):
                if lever not in FROM_THE_PIPELINE:
                    raise
    return tuple(dict.fromkeys(found))


def sentences(value, function, module):
    """The sentences of an expression in a function of a module.

    Raises AssertionError for an expression that it does not understand.
    """
    again = functools.partial(sentences, function=function, module=module)
    match value:
        case ast.Constant(value=str(text)):
            return [re.escape(text)] if text else []
        case ast.JoinedStr(values=parts):
            return [
                "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".+" for part in parts)
            ]
        case ast.IfExp(body=one, orelse=other):
            return again(one) + again(other)
        case ast.BoolOp(values=values):
            return [sentence for each in values for sentence in again(each)]
        case ast.Call(func=ast.Attribute(value=text, attr="format")):
            return [re.sub(r"\\{\w+\\}", ".+", sentence) for sentence in again(text)]
        case ast.Call(func=ast.Name(id=name)):
            return of_a_function(getattr(module, name))
        case ast.Name(id=name):
            given = [
                node.value
                for node in ast.walk(function)
                if isinstance(node, (ast.Assign, ast.NamedExpr))
                and name
                in {
                    getattr(target, "id", "")
                    for target in getattr(node, "targets", [getattr(node, "target", None)])
                }
            ]
            return (
                [sentence for each in given for sentence in again(each)]
                if given
                else [re.escape(getattr(module, name))]
            )
        case ast.Dict():
            return []
    raise AssertionError(
        f"{module.__name__}: this test does not understand this argument of Skip: {ast.unparse(value)}"
    )


def of_a_function(function):
    """All sentences that the function itself returns."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    text = (ast.Constant, ast.JoinedStr, ast.IfExp, ast.Name, ast.Call)
    returned = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and isinstance(node.value, text)
    ]
    return [sentence for each in returned for sentence in sentences(each, tree, inspect.getmodule(function))]
