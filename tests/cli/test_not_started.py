"""Commands that cannot work: said at once, before any program runs, with what was probably meant."""

import shlex
import sys

import pytest

pytestmark = pytest.mark.timeout(120)

MEASURE = [
    "tune",
    "profile",
    "memory",
    "batch",
    "lr",
    "trial",
    "compare --save x",
    "compare --plan none,none",
]
PIPED = ["python -", "python", "python -u", "python /dev/stdin"]
RAN = "open('ran', 'w')\n"


@pytest.mark.parametrize("command", MEASURE)
def test_an_option_that_disables_flatout_is_named_before_a_program_runs(flatout, script, command):
    script(RAN)
    done = flatout.here(*command.split(), "python", "-uI", "train.py")
    assert (done.code, done.out) == (3, "")
    assert done.err == "flatout: nothing can be measured: `python -I` disables flatout; remove -I\n"
    assert not (flatout.folder / "ran").exists()


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("compare", "python -"),
        *((command, PIPED[0]) for command in MEASURE),
        *(("tune", program) for program in PIPED[1:]),
    ],
)
def test_a_program_from_a_pipe_cannot_be_measured(flatout, command, program):
    words = (
        [f"{program} x", program if " " in program else f"{program} -"]
        if command == "compare"
        else program.split()
    )
    done = flatout.here(*command.split(), *words, stdin=RAN)
    assert (done.code, done.out) == (3, "")
    assert (
        "reads its program from a pipe, which can be read only once. Save the program in a file" in done.err
    )
    assert not (flatout.folder / "ran").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "why"),
    [("python -", "reads its program from a pipe"), ("python -I train.py", "`python -I` disables flatout")],
)
def test_run_advises_no_command_that_cannot_work(flatout, script, by_hand, program, why):
    source = by_hand.replace("1000000", "3")
    script(source)
    done = flatout("run", *program.split(), stdin=source)
    assert (done.code, done.out.splitlines()[-1]) == (0, "done")
    assert f"It cannot be tuned: nothing can be measured: {why}" in done.said[0].replace(f"`{program}` ", "")
    assert "flatout tune" not in done.err


@pytest.mark.processes
def test_run_takes_a_script_from_a_pipe(flatout):
    begin = f'exec {sys.executable} -m flatout run --no-summary python <(echo "print(6 * 7)")'
    done = flatout("-c", begin, python=["bash"])
    assert (done.code, done.out) == (0, "42\n")


@pytest.mark.parametrize(
    ("typed", "code", "says"),
    [
        ("tunee python train.py", 2, "there is no command 'tunee'; did you mean tune?"),
        ("python train.py", 2, "there is no command 'python'. Put `tune` or `run` before a program: `flatout run python ...`"),
        ("train.py", 2, "`flatout run train.py ...`"),

        ("run .", 127, "'.' is a folder. Did you mean `train.py`?"),
        ("run app", 127, "'app' is a folder. Did you mean `python app` (its __main__.py)?"),


        ("check lib", 2, "'lib' is a folder. Did you mean `lib/main.py`?"),
        ("run 'python train.py --lr 1'", 127, "did you mean python train.py --lr 1?"),
        ("tune 'python train.py'", 127, "The quotes make one word of a command line"),

        ("run train", 127, "there is no program 'train' on the PATH. Did you mean `train.py`?"),


        ("run pyhton train.py", 127, "Did you mean `python`?"),


        ("run -", 2, "Put `python` before it: `flatout run python - ...`"),
        ("tune --bugdet 3 python train.py", 2, "did you mean --budget?"),
        ("kernel chekc x", 2, "No such command 'chekc'"),
        ("run", 2, "no program was given"),

        ("run missing.py", 127, "no script 'missing.py'"),


        ("run --plan missing.toml python -c 1", 2, "no plan 'missing.toml'"),
        ("run --supervise --grace soon python -c 1", 2, "is not a time"),
        ("tune --budget 0 python train.py", 2, "cannot measure anything"),
        ("tune --budget -5s python train.py", 2, "is negative or too long"),




        ("tune --levers tf32,chanels_last python train.py", 2, "'chanels_last'; did you mean channels_last?"),
        ("tune --effects exakt python train.py", 2, "there is no effect 'exakt'; did you mean exact? --effects takes some of exact, rounding, precision, resampled."),

        ("tune --effects changes_math python train.py", 2, "chosen by name in a plan"),

        ("profile --schedule 1,2 python train.py", 2, "not a schedule"),

        ("profile --budget 1s python train.py", 2, "cannot measure"),

        ("profile --memory --trace t python train.py", 2, "no trace"),
        ("batch --sizes 8,none python train.py", 2, "list of batch sizes"),
        ("batch --memory-limit eight python train.py", 2, "amount of memory"),


    ],
)  # fmt: skip
def test_what_was_meant(flatout, script, typed, code, says):
    for name in ("train.py", "app/__main__.py", "lib/main.py", "lib/zoo.py", "empty/x.txt"):
        script(RAN, name)
    done = flatout.here(*shlex.split(typed))
    assert (done.code, done.out) == (code, "")
    assert says in " ".join(done.err.split())
    assert "Traceback" not in done.err
    assert {path.name for path in flatout.folder.iterdir()} == {"train.py", "app", "lib", "empty"}


def test_an_option_is_named_only_where_a_command_has_it(flatout, script):
    """.flatout is a file, so that no folder for records can be made."""
    script(RAN)
    (flatout.folder / ".flatout").write_text("")
    has = flatout.here("tune", "--job", ".flatout/x", "train.py")
    assert (has.code, "--job DIR names another folder" in has.err) == (4, True)
    has_not = flatout.here("run", "--plan", "missing.toml", "train.py")
    assert (has_not.code, "--job" in has_not.err) == (2, False)
