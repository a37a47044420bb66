"""The page of what `flatout check` found in public trainers, each finding judged by hand.

    python bench/check_open_set.py

check_open_set.json holds the sessions: `flatout check --budget 60s` on the unmodified training code of each, and the seconds
of a session with the default budget of 30 s. A finding is *true* (a maintainer would fix it), *opinion* (right, but they
may leave it) or *false*. This repository keeps none of the public code.
"""

from __future__ import annotations

import json
from collections import Counter

from provenance import HERE, markdown_table, stamp, write_result


def main() -> None:
    rows = json.loads((HERE / "check_open_set.json").read_text(encoding="utf-8"))
    verdicts = Counter((f["severity"], f["verdict"]) for row in rows for f in row["findings"])
    false = sum(count for (severity, verdict), count in verdicts.items() if verdict == "false")
    table = [
        (
            row["script"],
            row["origin"],
            row["seconds_30"],
            row["steps"],
            row["epochs"],
            "; ".join(row["unseen"]),
            "; ".join(f"{f['rule']} {f['file']}:{f['line']}: {f['verdict']}" for f in row["findings"])
            or "none",
            row["remark"],
        )
        for row in rows
    ]
    columns = (
        "script",
        "origin",
        "s, budget 30 s",
        "steps in 60 s",
        "epochs",
        "not seen",
        "findings",
        "remark",
    )
    text = (
        f"# Findings in public trainers\n\n{sum(verdicts.values())} findings in {len(rows)} sessions, {false} of them false; of "
        f"level *wrong result*: {sum(n for (severity, _), n in verdicts.items() if severity == 'wrong result')}. Seconds include the "
        f"start of the program, on a machine with other load.\n\n{markdown_table(columns, table)}"
    )
    write_result("check_open_set", stamp(), text, {"sessions": rows})


if __name__ == "__main__":
    main()
