"""The GitHub Action: its `run:` steps with bash, in a shallow clone of a repository whose step became slower.

`Runner` does what GitHub does: inputs reach a step only as environment variables, `if:` decides whether a
step runs, and outputs and the summary are files. The steps with `uses:` and the installation are not run.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from limits import hang_s
from programs import STEPS_BY_HAND

yaml = pytest.importorskip("yaml")
pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]

ROOT = Path(__file__).parents[2]
PROGRAM = f"""{STEPS_BY_HAND}
from work import PAUSE
for step in range(100000):
    steps(1)
    time.sleep(PAUSE)
"""
UNSAFE = "import torch\n\ntorch.load('model.pt', weights_only=False)\n"


class Runner:
    """One job with this action, in ``folder``."""

    def __init__(self, folder, temporary, environment, **inputs):
        temporary.mkdir()
        self.folder, self.temporary = folder, temporary
        self.action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
        unknown = set(inputs) - set(self.action["inputs"])
        assert not unknown
        self.values = {
            **{f"inputs.{name}": about["default"] for name, about in self.action["inputs"].items()},
            **{f"inputs.{name}": value for name, value in inputs.items()},
            "github.action_path": str(ROOT),
            "steps.install.outcome": "success",
        }
        self.summary = temporary / "summary.md"
        self.environment = {
            **environment,
            "RUNNER_TEMP": str(temporary),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_OUTPUT": str(temporary / "output"),
        }
        self.codes: dict[str, int] = {}
        self.said: dict[str, str] = {}

    def run(self):
        for step in self.action["runs"]["steps"]:
            failed = any(self.codes.values())
            condition = step.get("if", "")
            if (failed and "cancelled()" not in condition) or (condition and not self.value(condition)):
                continue
            if step["id"] == "install" or "uses" in step:
                self.codes[step["id"]] = 0
            else:
                self.script(step)

    def script(self, step):
        assert "${{" not in step["run"]  # an input would become a part of the script
        output = self.temporary / "output"
        output.write_text("")
        variables = {name: self.text(value) for name, value in step["env"].items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=hang_s(100),
        )
        self.codes[step["id"]], self.said[step["id"]] = done.returncode, done.stdout + done.stderr
        for line in output.read_text().splitlines():
            name, _, value = line.partition("=")
            self.values[f"steps.{step['id']}.outputs.{name}"] = value

    def text(self, template):
        return re.sub(r"\$\{\{(.*?)\}\}", lambda found: str(self.value(found[1]) or ""), template)

    def value(self, expression):
        """Evaluate an expression of GitHub's language; an unknown name is empty."""
        python = re.sub(
            r"[a-z_]+(\.[a-z_]+)+", lambda name: repr(self.values.get(name[0], "")), expression.strip()
        )
        for theirs, ours in (("!cancelled()", "True"), ("&&", " and "), ("||", " or ")):
            python = python.replace(theirs, ours)
        return eval(python)


def git(folder, *words):
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def pull_request(flatout, tmp_path):
    """A clone of depth 1, as actions/checkout makes it, and the base of the pull request, which it lacks."""
    origin = tmp_path / "origin"
    origin.mkdir()
    git(origin, "init", "-q", "-b", "main")
    git(origin, "config", "uploadpack.allowAnySHA1InWant", "true")  # as on GitHub
    (origin / ".gitignore").write_text(".flatout/\n__pycache__/\n")
    (origin / "train.py").write_text(PROGRAM)
    for pause in (0.004, 0.02):
        (origin / "work.py").write_text(f"PAUSE = {pause}\n")
        git(origin, "add", "-A")
        git(origin, "commit", "-qm", f"A pause of {pause} s")
    clone = flatout.folder / "clone"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{origin}", str(clone))
    return clone, git(origin, "rev-parse", "HEAD^")


def test_findings_are_annotated(flatout, pull_request, tmp_path):
    folder, _ = pull_request
    (folder / "load.py").write_text(UNSAFE)
    job = Runner(folder, tmp_path / "runner", flatout.environment(), check="*.py")
    job.run()
    assert job.codes == {"install": 0, "check": 1}, job.said
    assert "::notice title=FL304" in job.said["check"]
    assert ",line=3" in job.said["check"]
    assert "load.py:3" in job.summary.read_text()


@pytest.mark.full
def test_a_slower_step_fails_the_job(flatout, pull_request, tmp_path):
    folder, base = pull_request
    job = Runner(
        folder,
        tmp_path / "runner",
        flatout.environment(),
        command="python 'train.py'",
        gate="50%",
        budget="1s",
        options="--pairs 3",
    )
    job.values["github.event.pull_request.base.sha"] = base
    job.run()
    assert job.codes == {"install": 0, "compare": 1}, job.said
    summary = job.summary.read_text()
    assert "### B is slower" in summary
    assert "❌ failed" in summary
    assert "| time of a step |" in summary
    assert len(git(folder, "worktree", "list").splitlines()) == 1


def test_a_push_compares_nothing_and_says_so(flatout, pull_request, tmp_path):
    job = Runner(
        pull_request[0],
        tmp_path / "runner",
        flatout.environment(),
        command="python train.py",
        check="work.py",
    )
    job.run()
    assert job.codes == {"install": 0, "check": 0, "compare": 0}, job.said
    assert "Give the input rev" in job.said["compare"]


def test_inputs_that_cannot_be_split_are_named(flatout, pull_request, tmp_path):
    job = Runner(
        pull_request[0],
        tmp_path / "runner",
        flatout.environment(),
        command="python train.py",
        options="--gate-loss 'bits",
        rev="HEAD",
    )
    job.run()
    assert job.codes["compare"] == 1
    assert "::error title=flatout::the inputs options and command cannot be split" in job.said["compare"]
    assert "Traceback" not in job.said["compare"]


def test_a_script_that_cannot_be_read_fails(flatout, pull_request, tmp_path):
    (pull_request[0] / "half.py").write_text("def\n")
    job = Runner(pull_request[0], tmp_path / "runner", flatout.environment(), check="half.py")
    job.run()
    assert job.codes == {"install": 0, "check": 2}
    assert "half.py" in job.said["check"]
