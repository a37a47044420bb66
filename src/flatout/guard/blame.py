"""Finds the levers that make a replica of a step fail, on the same captured steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flatout.schema.plan import Choice

Judge = Callable[[list[Choice]], dict[str, Any]]


def narrowed(judge: Judge, choices: Sequence[Choice], rest_too: bool = True) -> dict[str, Any]:
    """Return the verdict on all choices, and which of them to leave out.

    ``choices``: the most valuable first. Without ``rest_too``, the rest is not judged. The answer is that of ``judge``, and also

        alone    the reason for each lever that fails by itself
        wrong    the reason for each lever to leave out: these, and each that fails together with more
                 valuable ones
        rest     the verdict on the rest; None if nothing was left out or nothing is left
    """
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def verdict(some: Sequence[Choice]) -> dict[str, Any]:
        key = tuple(choice.name for choice in some)
        if key not in known:
            known[key] = judge(list(some))
        return known[key]

    answer = verdict(choices)
    alone: dict[str, str] = {}
    if failure(answer) and len(choices) > 1:
        alone = {choice.name: why for choice in choices if (why := failure(verdict([choice])))}
    wrong, rest = dict(alone), [choice for choice in choices if choice.name not in alone]
    if not rest_too:
        return {**answer, "alone": alone, "wrong": wrong, "rest": None}
    if rest and failure(verdict(rest)):
        others, rest = rest, []
        for choice in others:
            if why := failure(verdict([*rest, choice])):
                wrong[choice.name] = why
            else:
                rest.append(choice)
    return {**answer, "alone": alone, "wrong": wrong, "rest": verdict(rest) if rest and wrong else None}


def failure(answer: dict[str, Any]) -> str:
    """Return the reason of the first failed check, or ""."""
    return next((str(check["why"]) for check in answer.get("checks", ()) if not check["passed"]), "")
