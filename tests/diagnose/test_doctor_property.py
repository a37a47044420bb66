"""Whatever a machine snapshot lacks and whatever garbage it holds, no check breaks, and none reports "fine"
for what it could not see.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import healthy

from flatout.diagnose.doctor.checks import TABLE
from flatout.schema.machine_snapshot import CommandResult, Verdict

# A text of letters, blanks and line breaks is no valid answer of a kernel, program or library.
GARBAGE = st.text(st.sampled_from("abcxyz \n\t<&\x00\ufffd"), max_size=60)


def spoiled(need, text):
    """The healthy machine, with one input of a check removed (None) or replaced by a meaningless text."""
    snapshot = healthy()
    kind, _, rest = need.partition(" ")
    if kind == "file":
        snapshot.files[rest] = text
    elif kind == "run":
        snapshot.command_results[rest] = (
            CommandResult([rest], 0, text or "", text or "")
            if text is not None
            else snapshot.command_results.pop(rest)
        )
        if text is None:
            del snapshot.command_results[rest]
    elif kind == "folder":
        snapshot.folders[rest] = None
    elif kind == "disk":
        del snapshot.disks[rest]
    elif kind == "torch":
        snapshot.torch[rest] = text if text is None else {"version": text, "loaded": text}
    elif kind == "python":
        snapshot.python[rest] = None if text is None else [text] if rest in ("libc", "path") else text
    else:
        vars(snapshot)[need] = None if need != "working_folder" else ""
    return snapshot


NEEDED = sorted({(check.code, need) for check in TABLE for need in check.needs})
BY_CODE = {check.code: check for check in TABLE}
# Names, lists and other fields that cannot be misread, and fields that are read in addition to the deciding
# text.
FREE = {
    ("FD018", "python path"),
    ("FD041", "python version"),
    ("FD041", "python path"),
    ("FD010", "run import torch"),
}


@pytest.mark.parametrize(("code", "need"), NEEDED, ids=[f"{code}-{need}" for code, need in NEEDED])
def test_a_missing_field_is_not_fine(code, need):
    assert BY_CODE[code].run(spoiled(need, None)).verdict == Verdict.NOT_CHECKED


@settings(max_examples=20)
@given(text=GARBAGE)
def test_garbage_is_not_fine(text):
    for code, need in NEEDED:
        if (code, need) not in FREE:
            found = BY_CODE[code].run(spoiled(need, text))
            assert found.verdict != Verdict.OK, (need, text, found)


def test_a_check_that_breaks_is_not_fine(monkeypatch):
    import dataclasses

    import flatout.diagnose.doctor.checks as doctor

    def broken(snapshot):
        raise KeyError("x")

    monkeypatch.setattr(doctor, "TABLE", (dataclasses.replace(TABLE[0], function=broken), *TABLE[1:]))
    first, *others = doctor.run_checks(healthy())
    assert (first.verdict, first.observed) == ("not checked", "bug in flatout: KeyError: 'x'")
    assert {check.verdict for check in others} == {"ok"}
