"""What holds for every page: no foreign text becomes a tag or a control sequence, and all of it fits."""

import base64
import hashlib
import io
import math
import re

import pytest
from browser import browser, find_browser
from hypothesis import given
from hypothesis import strategies as st
from pages import PAGES, Parsed, with_numbers, with_text
from rich.cells import cell_len
from rich.console import Console

from flatout.render.markdown import markdown
from flatout.render.page import html
from flatout.render.terminal import print_page, terminal
from flatout.schema.records import Ratio

HOSTILE = [
    "<script>alert(1)</script>\"'&\x1b[31m",
    "\"'><img src=x onerror=alert(1)>[red]",
    "</style></title></svg><script>\x9b2J",
    "{{ 7*7 }}{% for %} | `x`",
    "]]><!--\ud800\u202e",
]
WORDS = frozenset({"status", "severity", "verdict", "effect", "how", "result", "strategy"})
NUMBERS = st.one_of(
    st.floats(),
    st.integers(),
    st.none(),
    st.sampled_from([0, -1, 1, 1e-320, 5e-324, 1e29, 1e300, -1e300, 10**400]),
)


def page_of(name):
    make, build = PAGES[name]
    return build(make())


def shown(page, width=80):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(terminal(page))
    lines = out.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("name", PAGES)
def test_every_page_has_its_headline_and_fits(name):
    page = page_of(name)
    document = html(page)
    assert len(document.encode()) < 500_000
    text = Parsed(document).text
    assert " ".join(page.headline.split()) in text
    assert not re.search(r"\b(None|inf)\b", text)
    for width in (60, 80, 120):
        lines = shown(page, width)
        assert lines[0] == page.headline.replace("\u00a0", " ")[:width].rstrip() or width == 60
        assert all(sign.isascii() or sign in "─<>" for sign in "".join(lines)), "our own text is ASCII"


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("text", HOSTILE)
def test_foreign_text_stays_text(name, text):
    make, build = PAGES[name]
    for keep in (WORDS, frozenset({"status", "severity", "strategy"})):
        page = build(with_text(make(), text, keep))
        document = html(page)
        Parsed(document)  # rejects unknown tags
        assert "<script" not in document
        in_terminal = "\n".join(shown(page))
        assert not set(in_terminal) & {"\x1b", "\x07", "\x9b"}
        assert "[red]" not in text or "[red]" in in_terminal or name.startswith("empty")
        assert "<img" not in markdown(page).replace("\\<", "")


@pytest.mark.parametrize("name", ["session", "profile"])
@given(text=st.text(st.characters(), max_size=40), width=st.integers(40, 140))
def test_any_text_in_any_field(name, text, width):
    make, build = PAGES[name]
    page = build(with_text(make(), text))
    Parsed(html(page))
    shown(page, width)


@given(data=st.data())
def test_any_number_in_a_session(data):
    make, build = PAGES["session"]
    Parsed(html(build(with_numbers(make(), lambda: data.draw(NUMBERS)))))


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e300, -1.0, 0.0])
def test_numbers_that_cannot_be_drawn_do_no_harm(number):
    make, build = PAGES["profile"]
    Parsed(html(build(with_numbers(make(), lambda: number))))


def test_the_policy_allows_the_one_style_sheet_and_nothing_else():
    document = html(page_of("session"))
    style = re.search("<style>(.*)</style>", document, re.DOTALL)
    assert style
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert f'content="{policy}"' in document
    assert document.index("Content-Security-Policy") < document.index("<style>")
    assert "http" not in style[1]


@pytest.mark.parametrize("name", ["comparison", "profile", "batch"])
def test_a_headline_beside_other_programs_names_them_and_claims_no_figure(name):
    load = "other processes keep 1.0 of 2 cores busy (python (pid 7))"
    make, page = PAGES[name]
    record = make()
    record.disturbance = load
    if name == "batch":
        record.point(record.best).speed = Ratio(1.5, 1.4, 1.6, 6)
    headline = page(record).headline
    assert headline.endswith(load)
    if name != "profile":
        assert headline.endswith(f" beside other programs, cannot tell how much: {load}")


@pytest.mark.parametrize("width", [60, 120])
def test_the_next_command_is_the_last_line_in_one_piece(width):
    page = page_of("session")
    page.command[:] = ["python", "train.py", "--name", "two  blanks – and [red]a dash[/red]" * 4]
    out = io.StringIO()
    print_page(Console(file=out, width=width), page)
    assert out.getvalue().splitlines()[-1] == f"  {page.next_step[1]}"


def test_markdown_has_gates_and_tables_and_labels_are_no_markup():
    lines = markdown(page_of("comparison")).splitlines()
    assert lines[0] == "### B is slower: +25.0 % time per step (+20.0 to +30.0, n=6)"
    assert "| step time | 3 % | ❌ failed | the step time changes by +20.0 % to +30.0 %. |" in lines
    assert r"| B | \</code\>\`x\` \| \<img\> (python train.py) |" in lines
    assert "| time of a step | 4.00 ms | 5.00 ms | +25.0 % (+20.0 to +30.0) |" in lines
    (losses,) = [line for line in lines if line.startswith("different")]
    assert r"\<b\>nan\</b\> \| \_worse\_" in losses
    assert "* another program ran." in lines


@pytest.mark.processes
def test_a_real_browser_shows_every_page(tmp_path):
    """Light and dark, wide and narrow: no console message, no request but the page, nothing cut off."""
    program = find_browser()
    if program is None:
        pytest.skip("there is no chromium on this machine; no browser has displayed the pages")
    with browser(program) as window:
        for name in PAGES:
            path = tmp_path / f"{name.replace(' ', '_')}.html"
            path.write_text(html(page_of(name)), encoding="utf-8")
            for width, dark in ((1280, False), (400, True)):
                window.open(path, width, dark)
                assert window.complaints() == []
                assert window.requests() == [path.resolve().as_uri()]
                assert window.value("document.documentElement.scrollWidth") == width, f"{name} is too wide"
                style = "getComputedStyle(document.body)"
                paper, ink = window.value(f"[{style}.backgroundColor, {style}.color]")
                assert (
                    sum(map(int, re.findall(r"\d+", paper))) < sum(map(int, re.findall(r"\d+", ink)))
                ) == dark
