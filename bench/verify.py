"""Measures what `flatout verify` says of certificates of public scripts: intact, altered, and after an edit.

--set names the ``set.json`` of open_set.py. Each script is tuned in a copy of its folder, which lies beside it. Its
certificate is verified five times. First it is as `flatout tune` wrote it. Then one bit of a digest of the weights is
flipped. Third and fourth, another torch or processor is named too. Last, a constant is edited in a module of the
script, or in the script. A restart in the same month skips the verified scripts.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
import tokenize
from pathlib import Path
from typing import Any

from pairs import standing_in
from provenance import RESULTS, markdown_table, read_result, stamp, write_result
from rivals import environment_of, last_line

from flatout.schema.plan import Plan

HOW = INTACT, BIT, TORCH, PROCESSOR, EDIT = "as it is", "one bit", "other torch", "other processor", "an edit"
DIFFERS = {TORCH: ("versions", "torch [^,]+", "torch 2.0.0"), PROCESSOR: ("machine", ".+", "Z80, 1 cores")}


def flatout(*words: str) -> tuple[int, float, str, str]:
    """Returns exit code, seconds, output and errors of a command in the current folder."""
    began, argv = time.monotonic(), [sys.executable, "-m", "flatout", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, round(time.monotonic() - began, 1), done.stdout, done.stderr


def alter(record: dict[str, Any], how: str) -> None:
    """Flips the lowest bit of the last digest of the first tuned run; names another torch or processor."""
    if how in (BIT, *DIFFERS):
        step, digest = list((digests := record["tuned"][0]["weights_digests"]).items())[-1]
        digests[step] = f"{digest[:-1]}{int(digest[-1], 16) ^ 1:x}"
    if how in DIFFERS:
        name, old, new = DIFFERS[how]
        record["key"][name] = re.sub(old, new, record["key"][name])


def edit_constant(paths: list[Path], script: Path) -> str:
    """Halves the first fraction in the files, else adds 1 to the largest integer; in the script last of all."""
    found = []
    for path in paths:
        with tokenize.open(path) as file:
            found += [(path, token.string, *token.start) for token in tokenize.generate_tokens(file.readline)]
    found = [each for each in found if re.fullmatch(r"[\d.]*[1-9][\d.]*(e-?\d+)?", each[1])]
    found.sort(key=lambda each: (each[0] == script, each[1].isdigit(), each[1].isdigit() and -int(each[1])))
    path, old, line, column = found[0]
    new = f"{int(old) + 1}" if old.isdigit() else f"{float(old) / 2!r}"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[line - 1] = lines[line - 1][:column] + new + lines[line - 1][column + len(old) :]
    path.write_text("".join(lines), encoding="utf-8")
    return f"{path.name}, line {line}: {old} became {new}"


def verify(argv: list[str], certificate: str, how: str) -> dict[str, Any]:
    alter(record := json.loads(certificate), how)
    Path("altered.certificate.json").write_text(json.dumps(record), encoding="utf-8")
    words = argv if "***" in " ".join(record["command"]) else []  # a path that it does not name
    code, seconds, out, err = flatout("verify", "--json", "altered.certificate.json", *words)
    lines = json.loads(out)["lines"] if out.startswith("{") else []
    status = {line["name"]: line["status"] for line in lines}
    failing = [name for name, said in status.items() if said in ("FAILED", "not checked")]
    right = failing == (["tuned weights digests"] if how == BIT and record["repeatable"] else [])
    right = status.get("sources") == "FAILED" if how == EDIT else right
    if how in DIFFERS:
        claims = {said for name, said in status.items() if name.startswith(("plain ", "tuned ", "speed"))}
        right &= status.get(DIFFERS[how][0]) == "differs" and claims == {"not claimed"}
    right &= bool(lines) and code == bool(failing)
    print(f"    {how}: exit {code} in {seconds} s, {', '.join(failing) or 'no line fails'}", flush=True)
    why = {line["name"]: line["why"][:300] for line in lines if line["status"] != "holds"} or last_line(err)
    return {"exit": code, "seconds": seconds, "right": right, "failing": failing, "lines": status, "why": why}


def measure(argv: list[str], budget: str) -> dict[str, Any]:
    """Tunes the command in the current folder, and verifies its certificate."""
    code, seconds, out, err = flatout("tune", "--budget", budget, *argv)
    found = next(Path().rglob("flatout.certificate.json"), None)
    if code or found is None:
        return {"tune_s": seconds, "why": last_line(err) if code else " ".join(out.split("\n\n")[0].split())}
    record = json.loads(certificate := found.read_text(encoding="utf-8"))
    row = {"tune_s": seconds, "plan": Plan.from_json(record["plan"]).describe()}
    row |= {name: record[name] for name in ("repeatable", "verdict", "speedup")}
    row["checks"] = {how: verify(argv, certificate, how) for how in HOW[:-1]}
    files = [Path(part.split(" ")[0]) for part in record["key"]["sources"].split(", ")]
    row["edit"] = edit_constant([file for file in files if file.is_file()], Path(argv[1]))
    row["checks"][EDIT] = verify(argv, certificate, EDIT)
    return row


def page(rows: dict[str, dict[str, Any]]) -> str:
    ran, table = {name: row for name, row in rows.items() if "checks" in row}, []
    for name, row in ran.items():
        checks, cells = [row["checks"][how] for how in HOW], []
        for check in checks:
            cell = f"exit {check['exit']}: {', '.join(check['failing']) or 'no line'}"
            cells.append(cell if check["right"] else f"**{cell}**")
        verify_s = sum(check["seconds"] for check in checks) / len(checks)
        table.append((name, row["plan"], f"{row['tune_s']:.0f} / {verify_s:.0f}", *cells, row["edit"]))
    right = {how: sum(row["checks"][how]["right"] for row in ran.values()) for how in HOW}
    others = [f"{name} ({row['why']})" for name, row in rows.items() if name not in ran]
    return f"""# Is a certificate verified, and an altered one rejected?

Certificates: {len(ran)}; as expected: {", ".join(f"{how} {n}" for how, n in right.items())}. A cell shows the exit code and the failing lines. Bold
cells are not as expected. As it is, no line may fail. One flipped bit fails the line of the weights only. With another torch or
processor, bits and speed are of that machine alone: no line may fail, although a bit is flipped. An edit fails the line of the
sources, and others if it changes the training. Seconds: `flatout tune`, and `flatout verify` on average.

{markdown_table(("script", "plan", "seconds", *HOW, "the edit"), table)}

Without a certificate: {"; ".join(others) or "none"}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", type=Path, required=True, help="the set.json that lists the scripts")
    parser.add_argument("--scripts", type=int, default=10, help="end at this many certificates (default 10)")
    parser.add_argument("--budget", default="2m", help="time to tune each script (default 2m)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder instead of bench/results")
    args = parser.parse_args()
    made, home = stamp(), args.set.resolve().parent
    rows = read_result("verify", made, args.out).get("scripts", {})
    for script in json.loads(args.set.read_text(encoding="utf-8")):
        name, origin = script["name"], home / script["cwd"]
        verified = [each for each, row in rows.items() if "checks" in row]
        if name in verified or len(verified) >= args.scripts:
            continue
        print(f"{name} ...", flush=True)
        folder = origin.with_name(f"{origin.name}-verify")  # from where `../data` is the same folder
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(origin, folder, symlinks=True, ignore=shutil.ignore_patterns(".flatout", "flatout.*"))
        with standing_in(folder, environment_of(script)):
            rows[name] = {"made": stamp(), "budget": args.budget, **measure(script["argv"], args.budget)}
        shutil.rmtree(folder)
        print(f"{name}: {rows[name].get('plan', rows[name].get('why'))}", flush=True)
        write_result("verify", made, page(rows), {"scripts": rows}, {str(home): "SET"}, args.out.resolve())


if __name__ == "__main__":
    main()
