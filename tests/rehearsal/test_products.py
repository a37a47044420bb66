"""Levers that choose other products on a card: longer rows of logits for Tensor Cores, and fused attention.

The cards are a stand-in.
"""

import json
from pathlib import Path

import pytest
from cards import needed, on_cards

pytestmark = needed()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    done = on_cards(
        tmp_path_factory.mktemp("products"), "python", str(Path(__file__).with_name("products.py"))
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "sizes"),
    [("bfloat16", [320]), ("float16", [320]), ("tf32", [320]), ("float32", [257]), ("aligned", [264])],
)
def test_products_over_a_vocabulary_have_sizes_that_tensor_cores_like(seen, program, sizes):
    """Where no Tensor Core multiplies, or the vocabulary is already a multiple, nothing is longer."""
    assert seen[program] == {"sizes": sizes, "same": True}


@pytest.mark.processes
def test_attention_on_a_card(seen):
    """A causal mask is recognised from the third step on, without an earlier wait for it."""
    host, plain, lever = (seen["attention"][name] for name in ("host", "plain", "lever"))
    assert plain["losses"] == pytest.approx(host["losses"], rel=1e-5)
    assert lever["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert plain["losses"][-1] < 0.99 * plain["losses"][0]
    assert lever["reports"] == plain["attention"] == []
    kinds = list(dict.fromkeys(lever["attention"]))
    assert kinds == ["masked", "causal"], lever["attention"]
