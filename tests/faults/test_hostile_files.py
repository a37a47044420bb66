"""Foreign files: none runs code, and each ends with a clear message, within 512 MiB and 5 s.

`bench/fuzz.py` opens many more.
"""

import pytest
from hostile import hostile, mutated, opened, openers, warm

pytestmark = pytest.mark.processes

pytest.importorskip("torch", reason="not run: there is no torch here")

OPENERS = openers()
SHARED = (
    "a device without end",
    "a pipe that nobody writes to",
    "a pickle that runs code",
    "deep lists",
    "a list",
    "a link out of the folder",
    "half of itself",
    "a number of a million digits",
    "odd values 0",
    "odd values 1",
)
OF_ITS_OWN = {
    "plan": (
        "TOML without end",
        "TOML: a library",
        "TOML: code",
        "TOML: evil names",
        "a line for slow expressions",
        "a yaml tag",
    ),
    "session": ("many lists", "no UTF-8", "a terabyte of zeros"),
    "log": ("a traceback that never ends", "a long line", "control codes", "a terabyte of zeros"),
    "script": ("Python: deep", "Python: minus", "Python: power", "Python: coding", "one key many times"),
    "tensors": (
        "a header of a gigabyte",
        "a header without end",
        "a shape without end",
        "a NaN size",
        "two in one place",
        "negative",
        "wraps",
    ),
    "manifest": ("one key many times", "a zip of zeros"),
    "state": ("many lists", "deep tables"),
    "profile to scale": ("a command that is a number",),
}


@pytest.fixture(scope="module", autouse=True)
def warmed():
    warm()


@pytest.mark.parametrize("kind", OPENERS)
def test_files_that_are_bad_on_purpose(kind, tmp_path):
    opener = OPENERS[kind]
    files = hostile(opener)
    wrong = {}
    for number, title in enumerate(
        [*(title for title in SHARED if title in files), *OF_ITS_OWN.get(kind, ())]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        if why := opened(opener, files[title], folder).wrong():
            wrong[title] = why
    assert wrong == {}


@pytest.mark.parametrize("kind", [kind for kind, opener in OPENERS.items() if opener.sound])
def test_damaged_files(kind, tmp_path):
    opener, wrong = OPENERS[kind], {}
    for seed in range(-1, 4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        data = mutated(opener, seed) if seed >= 0 else opener.sound
        outcome = opened(opener, lambda path, data=data: path.write_bytes(data) and None, folder)
        if why := outcome.wrong():
            wrong[seed] = why
        if seed < 0:  # the sound one is really read; otherwise the tests would show nothing
            assert outcome.code in (0, 1), outcome
    assert wrong == {}
