"""What `flatout fix --apply` does to the files of one repository, checked without the code that makes the edits."""

from __future__ import annotations

import ast
import io
import json
import os
import signal
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from provenance import SRC  # noqa: F401  puts src on the path

from flatout.cli.main import flatout
from flatout.diagnose.check import check
from flatout.diagnose.rules import TABLE
from flatout.probe.program import ScriptProgram
from flatout.probe.script import Unreadable, notebook
from flatout.schema.findings import Finding

LONGEST_S = 60  # for one file; a program of hundreds of modules takes longer
TRAINS = (".backward(", "torch.load(", "DataLoader(")
CHANGES = {rule.code: rule.fix_changes for rule in TABLE}


class Late(Exception):
    """A file took too long."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def git_of(folder: Path) -> Path | None:
    """Returns the git directory of a mirror."""
    places = (folder, folder / "repo", folder / "repo" / ".git", folder / ".git")
    return next((place for place in places if (place / "HEAD").is_file()), None)


def repository(folder: Path) -> dict[str, Any]:
    """Checks out the newest commit of a mirror, and edits each of its training files, one at a time."""
    git = git_of(folder)
    found: dict[str, Any] = {
        "repository": folder.name.replace("+", "/"),
        "files": 0,
        "late": [],
        "edited": [],
    }
    counts: Counter[str] = Counter()
    if git is None:
        return {**found, "why": "no git directory"}
    with tempfile.TemporaryDirectory(prefix="fix-") as home:
        try:
            found["commit"] = check_out(git, Path(home))
        except (subprocess.CalledProcessError, tarfile.TarError) as error:
            return {**found, "why": str(error)[:200]}
        here = os.getcwd()
        os.chdir(home)
        try:
            for file in training_files():
                found["files"] += 1
                try:
                    with time_limit(LONGEST_S):
                        counts += one_file(file, found["edited"])
                except Late:
                    found["late"].append(str(file))
        finally:
            os.chdir(here)
    return {**found, "findings": dict(sorted(counts.items()))}


def check_out(git: Path, home: Path) -> str:
    """Writes Python files and notebooks of the newest commit to a folder, and returns the commit."""
    word = ["git", "--git-dir", str(git)]
    commit = subprocess.run([*word, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    for kinds in (["*.py", "*.ipynb"], ["*.py"]):  # without notebooks, or if a mirror lacks their contents
        done = subprocess.run([*word, "archive", "HEAD", "--", *kinds], capture_output=True)
        if done.returncode == 0:
            break
    done.check_returncode()
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(home, filter=_inside)
    return commit.strip()


def _inside(member: tarfile.TarInfo, home: str) -> tarfile.TarInfo | None:
    """Leaves out links that point outside the folder."""
    try:
        return tarfile.data_filter(member, home)
    except tarfile.FilterError:
        return None


def training_files() -> list[Path]:
    """Returns the files below the current folder that train or load something."""
    found = []
    for file in sorted([*Path().rglob("*.py"), *Path().rglob("*.ipynb")]):
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        if "torch" in text and any(word in text for word in TRAINS):
            found.append(file)
    return found


def one_file(file: Path, edited: list[dict[str, Any]]) -> Counter[str]:
    """Counts the findings of a file, and adds a row for each kind of edit to ``edited``."""
    try:
        program = ScriptProgram.read(file)
    except Unreadable:
        return Counter()
    findings = check(program)
    own = [each for each in findings if each.place and of_file(each.place.file) == str(file)]
    counts = Counter(f"{each.rule} {'edits' if each.edits else 'advice'}" for each in own)
    before = {source.path: Path(source.path).read_bytes() for source in program.sources}
    for every in (False, True):
        wanted = [each for each in findings if each.edits and (every or CHANGES[each.rule] == "")]
        mine = [each for each in wanted if each in own]
        if not mine or (every and not any(CHANGES[each.rule] for each in mine)):
            continue
        try:
            edited.append({"file": str(file), "all": every, **applied(file, every, findings, before)})
        finally:
            for path, data in before.items():
                Path(path).write_bytes(data)
    return counts


def of_file(place: str) -> str:
    """Returns the file of a place, which names a cell in a notebook."""
    return place.partition(".ipynb[")[0] + ".ipynb" if ".ipynb[" in place else place


def applied(file: Path, every: bool, findings: list[Finding], before: Mapping[str, bytes]) -> dict[str, Any]:
    """Runs `flatout fix --apply` on a program and judges the files afterwards."""
    words = ["fix", "--apply", "--json", *(["--all"] if every else []), str(file)]
    done = CliRunner().invoke(flatout, words, standalone_mode=False)
    if done.exception is not None:
        return {"failed": f"{type(done.exception).__name__}: {done.exception}"[:300]}
    record = json.loads(done.stdout)
    fixed = [finding for each in record["files"] for finding in each["fixed"]]
    row: dict[str, Any] = {
        "fixed": [f"{each['rule']} {each['place']['file']}:{each['place']['line']}" for each in fixed],
        "overlap": sum(len(each["left"]) for each in record["files"]),
        "broken": [],
        "other bytes": [],
    }
    changed = {path: Path(path).read_bytes() for path in before}
    for path, data in changed.items():
        edits = [finding for finding in fixed if of_file(finding["place"]["file"]) == path]
        if data != before[path] and not compiles(path, data):
            row["broken"].append(path)
        if not same_elsewhere(path, before[path], data, edits):
            row["other bytes"].append(path)
    row["files"] = sum(data != before[path] for path, data in changed.items())
    if not row["broken"]:
        row["not gone"], row["new"] = afterwards(file, findings, fixed)
    return row


def compiles(path: str, data: bytes) -> bool:
    text = data.decode("utf-8-sig")
    try:
        compile(
            notebook(text, path)[0] if path.endswith(".ipynb") else text,
            path,
            "exec",
            ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        )
    except (SyntaxError, ValueError, Unreadable):
        return False
    return True


def afterwards(file: Path, before: list[Finding], fixed: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Returns the rules that find as much as before although they were fixed, and those that find more."""
    gone = Counter((each["rule"], of_file(each["place"]["file"])) for each in fixed)
    had = Counter((each.rule, of_file(each.place.file)) for each in before if each.place)
    has = Counter(
        (each.rule, of_file(each.place.file)) for each in check(ScriptProgram.read(file)) if each.place
    )
    more = {key: count - (had[key] - gone[key]) for key, count in has.items()}
    more = {key: count for key, count in more.items() if count > 0}
    said = [(key, f"{key[0]} in {key[1]}: {count}") for key, count in sorted(more.items())]
    return [text for key, text in said if key in gone], [text for key, text in said if key not in gone]


# -- bytes ---------------------------------------------------------------------------------------------------


def same_elsewhere(path: str, before: bytes, after: bytes, fixed: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a file has its edits, and no other byte changed."""
    spans: dict[str, list[dict[str, Any]]] = {}
    for finding in fixed:
        known = spans.setdefault(finding["place"]["file"], [])
        known += [edit for edit in finding["edits"] if edit not in known]
    old, new = before.decode("utf-8"), after.decode("utf-8")
    if not path.endswith(".ipynb"):
        return new == replaced(old, spans.get(path, []))
    expected = json.loads(old.removeprefix("\ufeff"))
    for number, cell in enumerate(expected["cells"], 1):
        if f"{path}[{number}]" in spans:
            whole = replaced("".join(cell["source"]), spans[f"{path}[{number}]"])
            cell["source"] = whole if isinstance(cell["source"], str) else whole.splitlines(keepends=True)
    got = json.loads(new.removeprefix("\ufeff"))
    for one in (expected, got):
        for cell in one["cells"]:
            cell["source"] = "".join(cell["source"])
    lines = set(old.splitlines())
    added = [line.strip() for line in new.splitlines() if line not in lines]
    strings = all(line.startswith(('"', "]")) for line in added) or len(lines) < 10
    return bool(expected == got and strings)


def replaced(text: str, edits: list[dict[str, Any]]) -> str:
    """Returns a text with edits, from the last to the first."""
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    lines = list(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    lines.append("")
    newline = "\r\n" if "\r\n" in text else "\n"
    for edit in sorted(edits, key=lambda each: (each["line"], each["column"]), reverse=True):
        first, last = edit["line"] - 1, edit["end_line"] - 1
        head, tail = lines[first][: edit["column"] - 1], lines[last][edit["end_column"] - 1 :]
        lines[first : last + 1] = [head + edit["text"].replace("\n", newline) + tail]
    return mark + "".join(lines)
