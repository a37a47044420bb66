"""A command line of Python is parsed as the interpreter parses it: the interpreter itself reports what it made of it."""

import json
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flatout.launch.command import parse_python

pytestmark = pytest.mark.processes

REPORT = "import json, sys  # Save In Epochs\nprint('REPORT', json.dumps([sys.orig_argv[1:], sys.argv[1:], *map(bool, (sys.flags.isolated, sys.flags.no_site, sys.flags.ignore_environment, sys.flags.interactive))]))\n"

letters = st.text("bBdEIOPqRsSuvxi", min_size=1, max_size=3)
alone = st.one_of(
    letters.map("-{}".format),
    st.builds("-{}W{}".format, st.just("") | letters, st.sampled_from(["d", "ignore", "error::UserWarning"])),
    st.builds("-{}X{}".format, st.just("") | letters, st.sampled_from(["dev", "utf8", "I"])),
    st.sampled_from(
        ["-h", "-V", "-Z", "-uJ", "--version", "--help", "--nothing", "-u-check-hash-based-pycs", "-W", "-X"]
    ),
)
options = st.lists(
    st.one_of(
        alone.map(lambda word: [word]),
        st.sampled_from(
            [["-W", "ignore"], ["-X", "dev"], ["-uX", "I"], ["--check-hash-based-pycs", "always"]]
        ),
    ),
    max_size=3,
).map(lambda lists: [word for each in lists for word in each])
ends = st.one_of(
    st.sampled_from([["-c", REPORT], ["-c" + REPORT], ["-uc", REPORT], ["-Sc" + REPORT]]),
    st.sampled_from([["-m", "probe"], ["-mprobe"], ["-um", "probe"], ["-Improbe"]]),
    st.sampled_from([["probe.py"], ["--", "probe.py"], ["-"], ["--", "-"], [], ["-c"], ["-m"], ["-u", "--"]]),
)
arguments = st.lists(st.sampled_from(["-I", "-c", "x.py", "--", "", "-m", "é"]), max_size=2)


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probes")
    (folder / "probe.py").write_text(f"# -x skips this line\n{REPORT}")
    return folder


@example(["-c", "pass  # -S -I", "-E"])
@example(["-u", "-mprobe", "-S"])
@example(["-i", "-c", "-I"])
@example(["-u-check-hash-based-pycs", "-B", "-m", "probe"])
@given(st.builds(lambda *parts: [word for part in parts for word in part], options, ends, arguments))
def test_it_is_parsed_as_by_the_interpreter(probes, words):
    line = parse_python([sys.executable, *words])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=probes,
        input=REPORT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    reports = [json.loads(each[7:]) for each in done.stdout.splitlines() if each.startswith("REPORT ")]
    if not reports:
        if line.kind == "module":  # -I and -P leave this folder out
            assert f"No module named {line.words[0]}" in done.stderr, (words, line, done.stderr)
        elif line.kind == "code":
            assert line.words[0] != REPORT, (words, line, done.stderr)
        elif line.kind == "script":
            assert f"can't open file {str(probes / line.words[0])!r}" in done.stderr or not line.words[0], (
                words,
                line,
            )
        else:
            assert (line.kind, line.disables) == ("", None), (words, line, done.stderr)
        return
    given_words, argv, isolated, no_site, no_environment, interactive = reports[0]
    assert given_words == words
    assert line.kind, (words, line)
    assert argv == list(line.words[1:]), (words, line)
    assert bool(line.disables) == (isolated or no_site or no_environment), (words, line)
    what = {"code": REPORT, "module": "probe", "script": "probe.py", "stdin": "-"}[line.kind]
    # with -i, the report may be that of the standard input, after the code
    assert interactive or [*line.words[:1], what][0] == what, (words, line)
