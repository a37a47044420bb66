"""Tests `flatout explain` on provoked failures, and on recorded failures that cannot be provoked here.

    python bench/explain.py

Each program of tests/diagnose/provoked.py fails in a separate process. `explain` explains the failure from
the dying process and from the text of its traceback; the fixed version of the program runs. The texts of
tests/diagnose/recorded.py are only explained.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from provenance import ROOT, markdown_table, stamp, write_result

sys.path.insert(0, str(ROOT / "tests" / "diagnose"))

from provoked import PROGRAMS
from recorded import RECORDED

from flatout.diagnose.explain import explain, explain_text
from flatout.diagnose.failures import TABLE
from flatout.schema.failure import FailureRecord

PROVOKED = ROOT / "tests" / "diagnose" / "provoked.py"


def provoke() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seen.json"
        subprocess.run(
            [sys.executable, str(PROVOKED), str(out), *PROGRAMS],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        return json.loads(out.read_text())


def rows() -> list[dict]:
    found = []
    for seen in provoke():
        record = (
            FailureRecord(signal=seen["signal"])
            if "signal" in seen
            else FailureRecord.from_json(seen["live"])
        )
        live = explain(record)
        metadata = explain_text(seen["text"]) if seen["text"] else []
        found.append(
            {
                "kind": seen["code"],
                "failure": seen["name"].replace("_", " "),
                "how": "provoked",
                "said": live.message if live else "",
                "live": _verdict([live.rule] if live else [], seen["code"]),
                "text": _verdict([one.finding.rule for one in metadata], seen["code"])
                if seen["text"]
                else "no text",
                "fix": f"not run here: {seen['tried']}"
                if seen["tried"]
                else "runs"
                if not seen["fixed"]
                else "FAILS",
            }
        )
    for one in RECORDED:
        metadata = explain_text(one.text)
        found.append(
            {
                "kind": one.code,
                "failure": one.source,
                "how": "recorded",
                "live": f"not run here: {one.needs}",
                "fix": f"not run here: {one.needs}",
                "text": _verdict([each.finding.rule for each in metadata], one.code),
                "said": metadata[0].finding.message if metadata else "",
            }
        )
    return sorted(found, key=lambda row: (int(row["kind"][2:]), row["how"]))


def _verdict(rules: list[str], wanted: str) -> str:
    return "right" if rules == [wanted] else "unknown" if not rules else f"WRONG: {', '.join(rules)}"


def _count(rows: list[dict], column: str, value: str) -> int:
    return sum(row[column] == value for row in rows)


def _kinds(rows: list[dict]) -> int:
    return len({row["kind"] for row in rows})


def main() -> None:
    made = stamp()
    found = rows()
    provoked = [row for row in found if row["how"] == "provoked"]
    recorded = [row for row in found if row["how"] == "recorded"]
    kinds = {row["kind"] for row in found}
    neither = [f"{kind.code} {kind.name}" for kind in TABLE if kind.code not in kinds]
    tried = [row for row in provoked if not row["fix"].startswith("not run")]
    names = {kind.code: kind.name for kind in TABLE}
    header = (
        "kind",
        "failure",
        "how",
        "in the dying process",
        "from the text",
        "fixed version",
        "explanation",
    )
    columns = ("failure", "how", "live", "text", "fix", "said")
    table = markdown_table(
        header,
        [(f"{row['kind']} {names[row['kind']]}", *(row[column] for column in columns)) for row in found],
    )
    page = f"""# Failures explained

{len(provoked)} provoked failures of {_kinds(provoked)} kinds: {_count(provoked, "live", "right")} explained correctly in the dying process,
{_count(provoked, "text", "right")} of {len(provoked) - _count(provoked, "text", "no text")} explained correctly from the text of their traceback
(failures by a signal have none). {_count(tried, "fix", "runs")} of {len(tried)} fixed versions run without an error.

{len(recorded)} texts from public reports of {_kinds(recorded)} kinds that need a GPU, several machines or a broken installation: these failures are
not run here. {_count(recorded, "text", "right")} are explained correctly.

{len(neither)} of {len(TABLE)} kinds have been neither provoked nor recorded{": " + ", ".join(neither) if neither else ""}.

{table}
"""
    text, _ = write_result("explain", {**made, "slug": "cpu"}, page, {"rows": found})
    print(f"{text}: {len(provoked)} provoked, {len(recorded)} recorded")


if __name__ == "__main__":
    main()
