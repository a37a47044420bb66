"""The documentation site builds without a warning, and the generated pages match the code."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import hang_s

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("flatout_docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.full
@pytest.mark.processes
def test_the_site_builds_strictly(tmp_path):
    """A broken link, a missing anchor or a page outside the navigation is a warning, and a warning fails the
    build.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=hang_s(250),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    start = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "flatout tune" in start
    assert not re.findall(
        r'<(?:script|link|img)[^>]+(?:src|href)="https?://', start
    )  # nothing is loaded from another server
    assert (tmp_path / "site" / "reference" / "rules" / "FL001" / "index.html").is_file()


def test_a_page_holds_every_section_and_its_code(generate):
    for shelf in generate.SHELVES:
        for entry in shelf.table:
            page = generate.page(entry)
            for name in entry.sections:
                text = entry.section(name)
                assert not text or f"## {name}\n" in page
            assert page.count("```") == 2 * sum(
                bool(entry.section(name)) for name in generate.CODE_SECTIONS if name in entry.sections
            )


def test_every_command_option_and_lever_has_its_place(generate):
    from flatout.cli.main import COMMANDS
    from flatout.levers import TABLE

    commands, levers = generate.commands(), generate.levers()
    for name in COMMANDS:
        assert f"\n## flatout {name}\n" in commands
        for param in importlib.import_module(f"flatout.cli.{name}").command.params:
            assert all(option in commands for option in param.opts if option.startswith("--"))
    assert re.findall(r"^## (\w+)$", levers, re.MULTILINE) == [lever.name for lever in TABLE]


def test_every_field_of_a_session_is_documented(generate):
    from dataclasses import fields

    from flatout.schema.session import SessionRecord

    text = generate.records()
    assert all(f"| `{each.name}` |" in text for each in fields(SessionRecord))
