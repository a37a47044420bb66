"""Which expressions are surely modules: children, slices and entries of containers, and collections of them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from flatout.probe.script import SourceFile

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram

DEEP = 8
CHILDREN = {"children", "modules"}
NAMED_CHILDREN = {"named_children", "named_modules"}
SAME_ENTRIES = {"list", "tuple", "set", "reversed", "sorted", "iter", "islice", "tqdm", "chain"}
PARAMETERS = {"ParameterList", "ParameterDict", "Buffer", "UninitializedParameter", "UninitializedBuffer"}
# Parts of the models of these packages that are modules, whatever the model.
PACKAGES = ("torchvision", "timm", "transformers")
PARTS = {
    *("features", "classifier", "fc", "head", "heads", "backbone", "body", "fpn", "roi_heads", "rpn"),
    *("conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "avgpool", "encoder", "decoder", "pooler"),
    *("embeddings", "layer", "layers", "blocks", "transformer", "h", "bert", "roberta", "base_model"),
    *("vision_model", "text_model", "vit", "lm_head", "embed_tokens", "wte", "attention", "mlp"),
}


def is_module(program: ScriptProgram, source: SourceFile, node: ast.AST, depth: int = 0) -> bool:
    """Return whether every possible value of an expression is a module."""
    if depth > DEEP:
        return False
    if isinstance(node, ast.IfExp):
        return all(is_module(program, source, each, depth + 1) for each in (node.body, node.orelse))
    if isinstance(node, ast.Subscript):
        return holds_modules(program, source, node.value, (), depth + 1)
    if isinstance(node, ast.Name):
        bindings = source.names.reaching(node)
        if (
            bindings
            and all(each.how in ("for", "assign") for each in bindings)
            and any(
                each.how == "for"
                or isinstance(each.value, (ast.Subscript, ast.IfExp, ast.Attribute, ast.Call))
                for each in bindings
            )
        ):
            return all(
                each.value is not None
                and (
                    holds_modules(program, source, each.value, each.path, depth + 1)
                    if each.how == "for"
                    else not each.path and is_module(program, source, each.value, depth + 1)
                )
                for each in bindings
            )
    if isinstance(node, ast.Call):
        name = _called(node)
        if name == "getattr" and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            return _is_part(program, source, node.args[0], str(node.args[1].value), depth)
        if name == "next" and len(node.args) == 1:
            return holds_modules(program, source, node.args[0], (), depth + 1)
        if name == "get_submodule":
            return True
    if isinstance(node, ast.Attribute) and _is_part(program, source, node.value, node.attr, depth):
        return True
    origins = program.origins(source, node)
    return bool(origins) and all(
        "Module" in program.values.kinds(origin.source, origin.node)
        and not origin.part
        and origin.dotted.rpartition(".")[2] not in PARAMETERS - {"ParameterList", "ParameterDict"}
        for origin in origins
    )


def holds_modules(
    program: ScriptProgram, source: SourceFile, node: ast.AST, path: tuple[int, ...], depth: int = 0
) -> bool:
    """Return whether the entries of a collection are modules; with a path, this part of each entry."""
    if depth > DEEP:
        return False
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        return holds_modules(program, source, node.value, path, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return all(holds_modules(program, source, each, path, depth + 1) for each in (node.left, node.right))
    if isinstance(node, ast.IfExp):
        return all(holds_modules(program, source, each, path, depth + 1) for each in (node.body, node.orelse))
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)) and not path:
        return bool(node.elts) and all(
            holds_modules(program, source, each.value, (), depth + 1)
            if isinstance(each, ast.Starred)
            else is_module(program, source, each, depth + 1)
            for each in node.elts
        )
    if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)) and not path:
        return is_module(program, source, node.elt, depth + 1)
    if isinstance(node, ast.Call):
        return _call_holds(program, source, node, path, depth)
    if isinstance(node, ast.Name):
        bindings = source.names.reaching(node)
        if bindings and all(each.how in ("assign", "augment") and not each.path for each in bindings):
            values = [each.value for each in bindings if each.value is not None]
            if not any(isinstance(each, ast.Call) for each in values) or not _of_modules(
                program, source, node
            ):
                filled = _filled(source, node)
                known = [
                    each for each in values if not (isinstance(each, ast.List) and not each.elts and filled)
                ]
                return (
                    bool(known or filled)
                    and all(holds_modules(program, source, each, path, depth + 1) for each in known)
                    and all(is_module(program, source, each, depth + 1) for each in filled)
                )
    return not path and _of_modules(program, source, node)


def _call_holds(
    program: ScriptProgram, source: SourceFile, call: ast.Call, path: tuple[int, ...], depth: int
) -> bool:
    name = _called(call)
    if isinstance(call.func, ast.Attribute):
        if name in CHILDREN:
            return not path
        if name in NAMED_CHILDREN:
            return path == (1,)
        if name in ("values", "items") and not call.args:
            owner = call.func.value
            named = isinstance(owner, ast.Attribute) and owner.attr == "_modules"
            return (named or _of_modules(program, source, owner)) and path == (
                () if name == "values" else (1,)
            )
    if name in SAME_ENTRIES and call.args:
        given = call.args if name == "chain" else call.args[:1]
        return all(holds_modules(program, source, each, path, depth + 1) for each in given)
    if name == "filter" and len(call.args) == 2:
        return holds_modules(program, source, call.args[1], path, depth + 1)
    if name == "enumerate" and call.args and path[:1] == (1,):
        return holds_modules(program, source, call.args[0], path[1:], depth + 1)
    if name == "zip" and path and path[0] < len(call.args):
        return holds_modules(program, source, call.args[path[0]], path[1:], depth + 1)
    return not path and _of_modules(program, source, call)


def _of_modules(program: ScriptProgram, source: SourceFile, node: ast.AST) -> bool:
    """Return whether a value is a container module: Sequential, ModuleList, or a part of a known model."""
    if isinstance(node, ast.Attribute) and _is_part(program, source, node.value, node.attr, 0):
        return True
    containers = ("torch.nn.Sequential", "torch.nn.ModuleList", "torch.nn.ModuleDict")
    origins = program.origins(source, node)
    return bool(origins) and all(not each.part and each.dotted in containers for each in origins)


def _is_part(program: ScriptProgram, source: SourceFile, model: ast.AST, name: str, depth: int) -> bool:
    """Return whether this is a part of a model of torchvision, timm or transformers that is a module."""
    if name not in PARTS or depth > DEEP:
        return False
    if isinstance(model, ast.Subscript):
        model = model.value
    if isinstance(model, ast.Attribute) and _is_part(program, source, model.value, model.attr, depth + 1):
        return True
    origins = program.origins(source, model)
    return bool(origins) and all(
        each.dotted.split(".")[0] in PACKAGES and "Module" in program.values.kinds(each.source, each.node)
        for each in origins
    )


def _filled(source: SourceFile, name: ast.Name) -> list[ast.expr]:
    """Return what is appended to a list in the function of this use."""
    scope = source.function(name) or source.tree
    return [
        call.args[-1]
        for call in ast.walk(scope)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("append", "insert", "extend")
        and getattr(call.func.value, "id", "") == name.id
        and call.args
    ]


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
