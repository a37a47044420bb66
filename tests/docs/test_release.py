"""What `make release` rejects before it tests and builds, in a repository of its own; and that the files agree on the version."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flatout import __version__

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.processes
IDENTITY = ("-c", "user.name=Ada", "-c", "user.email=ada@example.com", "-c", "commit.gpgsign=false")


@pytest.fixture
def repository(tmp_path):
    """A committed repository that is ready for version 1.2.3."""
    files = {
        "src/flatout/__init__.py": '__version__ = "1.2.3"\n',
        "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2026-11-26)\n\n* A change.\n\n## 1.2.2 (2026-11-01)\n",
        "CITATION.cff": "version: 1.2.3\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".github").mkdir()
    shutil.copy(ROOT / ".github" / "release.sh", tmp_path / ".github")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder, *words):
    subprocess.run(["git", *IDENTITY, *words], cwd=folder, check=True, timeout=60)


def commit(folder):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "A commit")


def check(folder):
    done = subprocess.run(
        [".github/release.sh", "check"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_ready_tree_passes_also_at_its_own_tag(repository):
    assert check(repository) == (0, "")
    git(repository, "tag", "v1.2.3")
    assert check(repository) == (0, "")


def test_changes_are_named(repository):
    (repository / "forgotten.py").write_text("")
    code, why = check(repository)
    assert (code, "forgotten.py" in why) == (1, True)


def test_a_tag_of_another_commit(repository):
    git(repository, "tag", "v1.2.3")
    commit(repository)
    code, why = check(repository)
    assert code == 1
    assert "v1.2.3 is already the tag of" in why


@pytest.mark.parametrize(
    "heading", ["## 1.2.3 (unreleased)", "## 1.2.30 (2026-11-26)", "## 11203 (2026-11-26)"]
)
def test_a_section_that_is_missing_or_undated(repository, heading):
    (repository / "CHANGELOG.md").write_text(f"{heading}\n\n* A change.\n")
    commit(repository)
    code, why = check(repository)
    assert code == 1
    assert "Add '## 1.2.3 (YYYY-MM-DD)'" in why


def test_a_citation_of_another_version(repository):
    (repository / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.2\n")
    commit(repository)
    code, why = check(repository)
    assert (code, "CITATION.cff" in why) == (1, True)


def test_the_files_of_this_repository_agree_on_the_version():
    (newest,) = re.findall(
        r"\A# Changelog.*?^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest == cited == __version__
