"""Whose files count, what is kept of secrets, where nothing is sent, and what the source never contains."""

import ast
import json
import os
import re
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import STEPS_BY_HAND

from flatout.job.sanitize import MASK, masked
from flatout.job.trust import distrusted, private_folder
from flatout.launch.environment import private_caches
from flatout.schema.errors import StorageError

HOME = Path(__file__).parents[2] / "src" / "flatout"
IS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="not run: only root can give a file to another user")
NOBODY = 65534


# -- what the source never contains

RUNS_WHAT_IT_READS = re.compile(
    r"^(?:(?:c?pickle|_pickle|dill|cloudpickle|joblib|marshal|shelve|jsonpickle)\b.*|torch\.(?:load|jit\.load|export\.load|package\..*|distributed\.checkpoint\..*)|yaml\..*load\w*"
    r"|eval|exec|(?:.*\.)?(?:all_gather|gather|scatter|broadcast)_object(?:_list)?|(?:.*\.)?extractall|os\.system|os\.popen)$"
)


def is_literal(call):
    """Whether it runs a text that stands in the source: nothing was read from anywhere."""
    runs = ast.unparse(call.func) in ("exec", "eval")
    return runs and len(call.args) == 1 and isinstance(call.args[0], ast.Constant)


def code_runners(source):
    found = []
    for node in ast.walk(ast.parse(source)):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if isinstance(node, ast.Call) and not is_literal(node):
            names.append(ast.unparse(node.func).removeprefix("self."))
        found += [f"line {node.lineno}: {name}" for name in names if RUNS_WHAT_IT_READS.match(name)]
        if (
            isinstance(node, ast.keyword)
            and node.arg == "shell"
            and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        ):
            found.append(f"line {node.value.lineno}: shell")
    return found


def test_nothing_unpickles_evaluates_or_runs_a_shell():
    assert {
        str(path): found
        for path in HOME.rglob("*.py")
        if (found := code_runners(path.read_text(encoding="utf-8")))
    } == {}
    for line in (
        "import pickle",
        "from marshal import loads",
        "torch.load('x')",
        "yaml.load(x)",
        "eval(x)",
        "torch.distributed.all_gather_object(a, b)",
        "run(x, shell=True)",
        "os.system('x')",
        "tar.extractall()",
        "exec(x)",
        "exec('x' + y)",
    ):
        assert code_runners(line), line
    assert (
        code_runners(
            "exec('x')\nmodel.eval()\nre.compile(x)\nsafetensors.torch.load_file(x)\nrun(x, shell=False)"
        )
        == []
    )


# -- secrets


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("--token SECRET --lr 0.1", f"--token {MASK} --lr 0.1"),
        ("--token --lr 1", "--token --lr 1"),
        ("hub.token=SECRET lr=1", f"hub.token={MASK} lr=1"),
        ("--data https://user:SECRET@host/x", f"--data https://{MASK}@host/x"),
        ("s3://SECRET@bucket?token=SECRET&x=1", f"s3://{MASK}@bucket?token={MASK}&x=1"),
        ("x=ghp_abcdefghijklmnopqrstuvwxyz0123", f"x={MASK}"),
        (
            "--tokenizer gpt2 --keys 3 --keyframes 4 --passes 2 --monkey 1",
            "--tokenizer gpt2 --keys 3 --keyframes 4 --passes 2 --monkey 1",
        ),
        ("--tokens data/tokens.bin tokens=1e9", "--tokens data/tokens.bin tokens=1e9"),
        ("--token 12345678901234567890", f"--token {MASK}"),
        ("--password 1234 --db-pin=0000 PWD=1", f"--password {MASK} --db-pin={MASK} PWD={MASK}"),
        ("--use_auth_token True --auth=none", "--use_auth_token True --auth=none"),
        ("http://h/?key=3&pin=3&max_tokens=9", f"http://h/?key=3&pin={MASK}&max_tokens=9"),
        ("--hubToken SECRET ++a.clientSecret=SECRET", f"--hubToken {MASK} ++a.clientSecret={MASK}"),
    ],
)
def test_secrets_of_a_command_line(typed, kept):
    assert masked(typed.split()) == kept.split()


SECRETS = [
    "token",
    "api-key",
    "api_key",
    "apikey",
    "password",
    "passwd",
    "pwd",
    "secret",
    "auth",
    "credentials",
]
SECRETS += ["bearer", "access-key", "private_key"]
PREFIXES = st.from_regex(r"(?:[a-z]{1,8}[._-])?", fullmatch=True)
NUMBERS = st.integers(0, 10**9 - 1) | st.floats(0, 1e8).map(lambda x: round(x, 6))


@given(PREFIXES, st.sampled_from(SECRETS), st.from_regex(r"[a-z]{3}SECRET\w*", fullmatch=True), st.booleans())
def test_no_form_shows_the_value_of_a_secret(prefix, name, value, upper):
    name = prefix + (name.upper() if upper else name)
    forms = [
        [f"--{name}", value, "x"],
        [f"--{name}={value}"],
        [f"{name}={value}"],
        [f"http://h/?a=1&{name}={value}&b"],
    ]
    for words in forms:
        assert [word for word in masked(words) if "SECRET" in word.replace(name, "")] == []


@given(PREFIXES, st.sampled_from(["tokens", "keys", "passes", "token", "key", "pass"]), NUMBERS)
def test_counts_are_shown(prefix, name, number):
    for words in [
        [f"--{prefix}{name}", str(number)],
        [f"--{prefix}{name}={number}"],
        [f"{prefix}{name}={number}"],
    ]:
        assert masked(words) == words


@given(st.lists(st.text(max_size=30), max_size=6))
def test_masking_keeps_the_number_of_words_and_is_done_once(words):
    assert len(masked(words)) == len(words)
    assert masked(masked(words)) == masked(words)


WATCH = """
import atexit, json, os, sys
def heard(event, args):
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request", "http.client.connect"):
        with open(os.environ["OBSERVED"], "a") as file:
            file.write(json.dumps([event, repr(args[1:] if event.startswith("socket.") and event[7] != "g" else args)]) + "\\n")
sys.addaudithook(heard)
"""


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_a_measured_program_leaves_no_secret_and_uses_no_network(flatout, script):
    """One `flatout profile` with secrets on its command line and its own home.

    It checks the written and shown text, the connections of its processes, and who may read the files.
    """
    pytest.importorskip("torch", reason="not run: there is no torch here")
    script(STEPS_BY_HAND + "steps(10**6)\n")
    (flatout.folder / "watch").mkdir()
    (flatout.folder / "watch" / "sitecustomize.py").write_text(WATCH)
    observed = flatout.folder / "observed"
    environment = {
        "PYTHONPATH": str(flatout.folder / "watch"),
        "OBSERVED": str(observed),
        "HOME": str(flatout.folder),
        "MY_API_TOKEN": "FROMENVIRONMENT",
        "TMPDIR": "/tmp",
    }
    words = ("train.py", "--token", "WORDSECRET", "--password=WORDSECRET", "https://me:WORDSECRET@host/data")
    done = flatout("profile", "--budget", "6s", *words, env=environment, timeout=180)
    assert done.code == 0, done.err
    job = next((flatout.folder / ".flatout").glob("*/"))
    assert stat.S_IMODE(job.stat().st_mode) == 0o700
    texts = {
        path: path.read_text(errors="replace")
        for path in flatout.folder.rglob("*")
        if path.is_file() and path.suffix in (".json", ".html", ".toml", ".log", ".md")
    }
    assert {"profile.json", "profile.html"} <= {path.name for path in texts}
    for where, text in {**texts, "stdout": done.out, "stderr": done.err}.items():
        assert "WORDSECRET" not in text, where
        assert "FROMENVIRONMENT" not in text, where
    assert json.loads((job / "profile.json").read_text())["command"][1:3] == ["--token", MASK]
    page = (job / "profile.html").read_text()
    assert f"{flatout.folder}/" not in page
    assert "default-src 'none'" in page
    asked = [json.loads(line) for line in observed.read_text().splitlines()]
    assert any("flatout-" in place for _, place in asked)  # the connection between a trial and its parent
    assert [each for each in asked if "flatout-" not in each[1]] == []


# -- whose files count


@pytest.mark.processes
@IS_ROOT
def test_a_plan_of_another_user_is_not_used(flatout, script):
    (flatout.folder / "train.py").write_text("print('trained')\n")
    plan = flatout.folder / "flatout.toml"
    plan.write_text("[levers]\ngc_pause = true\n")
    for owner, mode, words in ((NOBODY, 0o644, "it belongs to"), (0, 0o666, "anyone can write to it")):
        os.chown(plan, owner, owner)
        plan.chmod(mode)
        done = flatout("run", "train.py")
        assert done.code == 0
        assert done.out == "trained\n"
        assert words in done.said[0]
        assert f"--plan {plan.name} uses it anyway" in done.said[0]
    os.chown(plan, NOBODY, NOBODY)
    plan.chmod(0o644)
    os.chown(flatout.folder / "train.py", NOBODY, NOBODY)  # the owner of the script can do anything anyway
    assert "belongs to" not in flatout("run", "train.py").err


@IS_ROOT
def test_records_and_folders_of_others_are_not_used(tmp_path, monkeypatch):
    from flatout.job.folder import JobFolder

    job = tmp_path / "project" / ".flatout" / "train-1"
    job.mkdir(parents=True)
    os.chown(job, NOBODY, NOBODY)
    with pytest.raises(StorageError, match=r"it belongs to the user .* Move the folder away"):
        JobFolder(job).make()
    os.chown(
        tmp_path / "project", NOBODY, NOBODY
    )  # in a container the user is root among files of the user outside
    JobFolder(job).make()
    place = tmp_path / "flatout-ranks-guessed"
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)
    with pytest.raises(StorageError, match="is not trusted"):
        private_folder(place)
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(StorageError):
        private_folder(place)
    place.unlink()
    before = os.umask(0)
    try:
        assert stat.S_IMODE(private_folder(place).stat().st_mode) == 0o700
        place.chmod(0o777)
        assert stat.S_IMODE(private_folder(place).stat().st_mode) == 0o700
    finally:
        os.umask(before)


@IS_ROOT
def test_compiled_code_of_others_is_not_loaded(tmp_path, monkeypatch):
    """The places where torch and Triton look by default: only the user's own files are used."""
    import tempfile

    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TRITON_HOME": str(tmp_path)}
    assert private_caches(environment) == ({}, [])
    usual = Path(default_cache_dir())
    assert usual.parent == tmp_path
    usual.mkdir(mode=0o755)
    assert private_caches(environment) == ({}, [])  # warm, and flatout's own
    os.chown(usual, NOBODY, NOBODY)
    found, (said,) = private_caches(environment)
    own = Path(found["TORCHINDUCTOR_CACHE_DIR"])
    assert own.parent == tmp_path / "cache" / "flatout"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert "it belongs to" in said
    assert str(usual) in said
    assert private_caches({**environment, "TORCHINDUCTOR_CACHE_DIR": str(usual)}) == (
        {},
        [],
    )  # the user's own choice
    os.chown(usual, 0, 0)
    for mode in (0o777, 0o775):
        usual.chmod(mode)
        os.chown(usual, 0, 100)
        assert private_caches(environment)[0], oct(mode)
    (tmp_path / ".triton" / "cache").mkdir(parents=True)
    os.chown(tmp_path / ".triton" / "cache", NOBODY, NOBODY)
    assert set(private_caches(environment)[0]) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


def test_missing_files_and_our_own_are_trusted(tmp_path):
    assert distrusted(tmp_path / "nothing") == ""
    assert distrusted(tmp_path) == ""
    assert distrusted("/tmp") == ""  # everybody may write into it, and nobody may remove another user's files
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert distrusted(tmp_path / "open") == "anyone can write to it"
    assert sys.platform == "linux"
