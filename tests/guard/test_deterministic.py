"""Checked steps ask for deterministic kernels; afterwards every flag is the script's again."""

import os
import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from flatout.agent.ledger import Ledger  # noqa: E402
from flatout.agent.listener import Listener  # noqa: E402
from flatout.agent.training_context import TrainingContext  # noqa: E402
from flatout.guard.deterministic import WORKSPACE, deterministic_kernels  # noqa: E402
from flatout.levers import cudnn_benchmark  # noqa: E402
from flatout.schema.lever import Options, Skip  # noqa: E402

CUDNN, MEMORY = torch.backends.cudnn, torch.utils.deterministic


def flags():
    return (
        torch.get_deterministic_debug_mode(),
        CUDNN.deterministic,
        CUDNN.benchmark,
        MEMORY.fill_uninitialized_memory,
        os.environ.get(WORKSPACE[0]),
        len(warnings.filters),
    )


@pytest.fixture
def context():
    before = flags()
    yield TrainingContext(torch, Listener(), Ledger())
    torch.set_deterministic_debug_mode(before[0])
    CUDNN.deterministic, CUDNN.benchmark, MEMORY.fill_uninitialized_memory = before[1:4]


def unrepeatable():
    """torch warns of this operator, or raises, where a script asks for deterministic algorithms."""
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("benchmark", [False, True])
@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_flags_change_inside_and_are_the_scripts_again(context, mode, benchmark, workspace, monkeypatch):
    monkeypatch.delenv(WORKSPACE[0], raising=False)
    if workspace:
        monkeypatch.setenv(WORKSPACE[0], workspace)
    torch.set_deterministic_debug_mode(mode)
    CUDNN.deterministic, CUDNN.benchmark = not benchmark, benchmark
    before, answer = flags(), context.kernel_flags()
    with deterministic_kernels(context):
        assert flags()[:-1] == (mode or 1, True, False, False, workspace or WORKSPACE[1])
        assert context.kernel_flags() == answer
    assert flags() == before
    assert context.kernel_flags() == answer


def test_an_operator_without_a_deterministic_kernel_runs_in_silence(context):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.set_deterministic_debug_mode("warn")
        with pytest.raises(UserWarning, match="deterministic implementation"):
            unrepeatable()
        torch.set_deterministic_debug_mode("default")
        with deterministic_kernels(context):
            unrepeatable()


def test_what_the_script_sets_meanwhile_stays(context):
    CUDNN.benchmark = False
    with deterministic_kernels(context):
        torch.set_deterministic_debug_mode("error")
        CUDNN.benchmark, CUDNN.deterministic = True, False
    assert (torch.get_deterministic_debug_mode(), CUDNN.benchmark, CUDNN.deterministic) == (2, True, False)


def test_levers_read_the_flags_of_the_script(context):
    gpu = SimpleNamespace(cuda=True)
    CUDNN.deterministic = CUDNN.benchmark = False
    with deterministic_kernels(context):
        assert isinstance(cudnn_benchmark.applies(gpu, context), Options)
    CUDNN.benchmark = True
    with deterministic_kernels(context):
        assert isinstance(cudnn_benchmark.applies(gpu, context), Skip)
