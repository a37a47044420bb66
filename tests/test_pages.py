"""docs/generate.py: the pages made from the code exist and are up to date."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("flatout_docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_pages_are_up_to_date(generate):
    assert [path.name for path in generate.outdated()] == [], "run `python docs/generate.py`"


def test_a_changed_and_a_missing_page_are_detected(generate, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "HERE", tmp_path)
    for path, text in generate.pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert generate.outdated() == []
    (tmp_path / "rules" / "FL001.md").write_text("something else", encoding="utf-8")
    (tmp_path / "rules" / "FL999.md").write_text("of a rule that is gone", encoding="utf-8")
    assert {path.name for path in generate.outdated()} == {"FL001.md", "FL999.md"}


def test_a_page_holds_every_section_and_its_code(generate):
    for shelf in generate.SHELVES:
        for entry in shelf.table:
            page = generate.page(entry)
            for name in entry.sections:
                text = entry.section(name)
                assert not text or f"## {name}\n" in page
            assert page.count("```") == 2 * sum(bool(entry.section(name)) for name in generate.CODE_SECTIONS if name in entry.sections)
