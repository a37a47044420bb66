"""The device and the seed of a Loop, and their messages."""

import logging
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flatout  # noqa: E402
from flatout.schema.errors import LoopError  # noqa: E402

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@NO_GPU
def test_without_a_gpu_it_uses_the_cpu_and_says_so(caplog):
    caplog.set_level(logging.INFO, "flatout")
    assert flatout.device() == torch.device("cpu")
    assert "training on the CPU: " in caplog.text
    assert flatout.device("cpu") == torch.device("cpu")


@NO_GPU
def test_a_missing_gpu():
    with pytest.raises(LoopError, match=r"'cuda:3' is not available: .*flatout doctor"):
        flatout.device("cuda:3")
    with pytest.raises(LoopError, match="torch does not know"):
        flatout.device("gpu")


def test_a_seed_reaches_every_generator():
    def drawn():
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    assert flatout.seed(7) == 7
    first = drawn()
    assert drawn() != first
    flatout.seed(7)
    assert drawn() == first


@pytest.mark.parametrize("value", [-1, 2**32, 1.5, True, "0"])
def test_a_seed_that_numpy_would_reject(value):
    with pytest.raises(LoopError, match="whole number"):
        flatout.seed(value)


def test_deterministic_mode_on_request(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        flatout.seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
