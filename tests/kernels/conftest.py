"""The gates of all kernels, run once: one child for all of them, with the emulator's libraries compiled two
at a time.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flatout.kernels import NAMES
from flatout.launch.compiler import emulate, run_child

LIMIT_S = 200.0
WRONG = Path(__file__).parent / "wrong"  # each kernel with its known-wrong variants
ALL = """
import sys
from pathlib import Path
from flatout.kernels.__main__ import main
for name in sys.argv[3:]:
    main(f"{sys.argv[2]}/{name}.py", Path(sys.argv[1]) / name, -1)
"""


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """The folder of the emulator's libraries, and the compiler's messages for each."""
    pytest.importorskip("torch")
    from flatout.kernels import load

    folder = tmp_path_factory.mktemp("emulated")
    sources = {source.path: source for name in NAMES for source in load(name).sources}
    with ThreadPoolExecutor(2) as pool:
        said = list(
            pool.map(lambda s: emulate(s.path, folder / s.emulated_name, s.kernels()), sources.values())
        )
    return folder, dict(zip((s.parent.name for s in sources), said, strict=True))


@pytest.fixture(scope="session")
def gates(request, emulated, tmp_path_factory):
    """The outcomes of the checks of each kernel that a test asks for, by name."""
    names = list(
        dict.fromkeys(
            item.callspec.params["name"] for item in request.session.items if "gates" in item.fixturenames
        )
    )
    records = tmp_path_factory.mktemp("records")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "FLATOUT_EMULATED": str(emulated[0]),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ended = run_child([sys.executable, "-c", ALL, str(records), str(WRONG), *names], environment, LIMIT_S)
    assert ended.code == 0, ended.output
    found = {}
    for name in names:
        lines = [json.loads(line) for line in (records / name).read_text().splitlines()]
        assert lines[-1] == {"ended": True}
        found[name] = {line["name"]: (line["status"], line["why"]) for line in lines if "name" in line}
        assert list(found[name]) == lines[0]["checks"]
    return found
