"""Writes the page of pull_requests.py from its records alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

from provenance import markdown_table

HALVES = ("A", "B", "C", "D")
KINDS = ("true", "opinion", "false", "not judged")
HEADER = (
    "half",
    "cases",
    "`check`: named first",
    "named",
    "not named",
    "no static rule exists",
    "gone after the fix",
    "`profile` of a small program: first, its line",
    "either command: named first",
    "either command: named",
    "other findings",
    *KINDS,
)


def page(
    cases: dict[str, dict[str, Any]], done: dict[str, dict[str, Any]], first: list[dict[str, Any]]
) -> str:
    """Returns the page. ``first`` are figures before rules were changed because of these cases."""
    parts = [
        "# Pull requests of public trainers\n",
        "What maintainers of public PyTorch trainers found and fixed, and whether flatout names it. `check` reads the commit before the fix in a checkout, "
        "as its user would run it. It is never run: no figure of `check` depends on the machine. Named first: the first finding is one that counts, within 3 lines of a changed "
        "line. Named: any finding is. The cases were written down before any rule was run on them; A and B are a random split. The authors knew the names of the rules by then.\n",
        "`profile` measures a small program of ours with the same fault. Its proportions are ours, so it shows what the rules can see, not how often.\n",
        "Rules were first changed for half A alone; that did not help half B (see the earlier figures). Then the cases of half B were read as well, so today's figures of A and B are not held out. "
        "Set C was chosen after that, and set D after rules had been written for C, by readers who had not seen the rules; one case from a repository, none twice. The first figures of each show what to expect on an unknown program: about one case in six named first.\n",
        markdown_table(
            HEADER,
            [summary(half, cases, done) for half in (*HALVES, "A and B") if of_half(half, cases, done)],
        ),
        "",
    ]
    if first:
        parts += [
            "## Earlier figures\n",
            markdown_table(tuple(first[0]), [tuple(look.values()) for look in first]),
            "",
        ]
    for half in HALVES:
        parts += [f"## Half {half}\n", case_table(half, cases, done), ""]
    parts += ["## What the maintainers found\n", found_table(cases), "", "## Other findings\n"]
    return "\n".join([*parts, alarm_table(done), "", *rule_part(done)])


def of_half(half: str, cases: dict[str, dict[str, Any]], done: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name in cases if name in done and cases[name]["half"] in half]


def measured_first(entry: dict[str, Any]) -> bool:
    return (entry.get("profile") or {}).get("verdict") == "first"


def measured_named(entry: dict[str, Any]) -> bool:
    return (entry.get("profile") or {}).get("verdict", "").startswith(("first", "named"))


def summary(half: str, cases: dict[str, dict[str, Any]], done: dict[str, dict[str, Any]]) -> tuple[Any, ...]:
    names = of_half(half, cases, done)
    ranks = Counter(done[name]["check"] for name in names)
    right = [name for name in names if done[name]["by"]]
    gone = sum(done[name]["after the fix"] == "gone" for name in right)
    programs = [name for name in names if done[name].get("profile")]
    alarms = Counter(alarm["verdict"] for name in names for alarm in done[name]["alarms"])
    return (
        half,
        len(names),
        ranks["named first"],
        ranks["named"],
        ranks["not named"],
        sum(ranks_no_rule(cases[name]) for name in names),
        f"{gone} of {len(right)}",
        f"{sum(measured_first(done[name]) for name in programs)} of {len(programs)}",
        sum(done[name]["check"] == "named first" or measured_first(done[name]) for name in names),
        sum(bool(done[name]["by"]) or measured_named(done[name]) for name in names),
        sum(alarms.values()),
        *(alarms[kind] for kind in KINDS),
    )


def ranks_no_rule(case: dict[str, Any]) -> bool:
    """Whether no rule of `check` covers the kind of fault: none at all, or only a measured one."""
    return not case["rules"] or "check" not in case["judged"]


def case_table(half: str, cases: dict[str, dict[str, Any]], done: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name in of_half(half, cases, done):
        case, entry = cases[name], done[name]
        alarms = Counter(alarm["verdict"] for alarm in entry["alarms"])
        profile = entry.get("profile")
        fixed = "-"
        if profile:
            found = profile["well"]["findings"]
            fixed = "failed" if found is None else ", ".join(f["rule"] for f in found) or "none"
        rows.append(
            (
                f"`{name}`",
                case["kind"],
                case["topic"],
                ", ".join(case["rules"]) or "none yet",
                entry["check"] + (f" ({'; '.join(entry['failed'])})" if entry["failed"] else ""),
                ", ".join(entry["by"]) or "-",
                entry["after the fix"],
                profile["verdict"] if profile else "-",
                fixed,
                ", ".join(f"{alarms[kind]} {kind}" for kind in KINDS if alarms[kind]) or "none",
                entry["flatout"],
            )
        )
    header = (
        "case",
        "kind",
        "topic",
        "rules that count",
        "`check`",
        "by",
        "after the fix",
        "`profile` of the small program",
        "findings on its fixed version",
        "other findings",
        "flatout",
    )
    return markdown_table(header, rows)


def found_table(cases: dict[str, dict[str, Any]]) -> str:
    rows = [
        (
            f"`{name}`",
            case["link"],
            f"{case['file']}@{case['parent'][:7]}",
            f"{case['fix'][:7]}",
            case["found"],
            case.get("gain", "none published"),
        )
        for name, case in cases.items()
    ]
    return markdown_table(
        ("case", "thread", "file before the fix", "fix", "what they found", "gain, by their figures"), rows
    )


def alarm_table(done: dict[str, dict[str, Any]]) -> str:
    rows: dict[tuple[str, str, str, str, str], list[int]] = {}
    for name, entry in done.items():
        for alarm in entry["alarms"]:
            key = (name, alarm["file"], f"{alarm['rule']} {alarm['name']}", alarm["verdict"], alarm["why"])
            rows.setdefault(key, []).append(alarm["line"])
    return markdown_table(
        ("case", "file", "lines", "rule", "verdict", "why"),
        [
            (f"`{name}`", file, ", ".join(map(str, lines)), rule, rated, why)
            for (name, file, rule, rated, why), lines in rows.items()
        ],
    )


def rule_part(done: dict[str, dict[str, Any]]) -> list[str]:
    by_rule = Counter(
        (alarm["rule"], alarm["name"], alarm["verdict"])
        for entry in done.values()
        for alarm in entry["alarms"]
    )
    rules = sorted({(rule, name) for rule, name, _ in by_rule})
    return [
        "## Other findings, by rule\n",
        markdown_table(
            ("rule", "name", *KINDS),
            [(rule, name, *(by_rule[rule, name, kind] for kind in KINDS)) for rule, name in rules],
        ),
    ]
