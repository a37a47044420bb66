"""The report of a session on its ranks, and on levers tried by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.render import ranks_summary, summary
from flatout.schema.records import Ratio


def test_ranks_compared_with_one_process(recorded):
    session = recorded("session")
    assert (
        ranks_summary.summary(session)
        == "2 ranks are 1.62 times as fast as one process (1.55–1.70): 81 % of 2 times its speed."
    )
    assert ranks_summary.rows(session.ranks) == [
        ("rank 0, node0", "1.20 ms", "88.0 ms", "22.8 ms", "32.0"),
        ("rank 1, node1", "14.0 ms", "93.0 ms", "5.00 ms", "32.0"),
    ]
    said = ranks_summary.remarks(session.ranks)
    assert said[0] == "Each rank contributes 4.50 MiB of gradients to the exchange in each step."
    assert said[1].startswith("9.1 ms of a step of 112.0 ms go into waiting")
    assert said[1].endswith("for its data, the others 1.2 ms.")


@pytest.mark.parametrize(
    ("ratio", "why_not", "said"),
    [
        (Ratio(0.8, 0.7, 0.9, 3), "", "One process is faster here: run without ranks."),
        (Ratio(3.1, 2.9, 3.3, 3), "", "Ranks alone cannot explain that"),
        (
            None,
            "one process of it could not be measured",
            "2 ranks; one process of it could not be measured.",
        ),
        (None, "", "2 ranks."),
    ],
)
def test_ranks_that_surprise(recorded, ratio, why_not, said):
    session = recorded("session")
    session.ranks = replace(session.ranks, ratio=ratio, why_not=why_not)
    assert said in ranks_summary.summary(session)


def test_ranks_that_are_even_or_were_not_measured(recorded):
    found = recorded("session").ranks
    assert (
        ranks_summary.remarks(replace(found, imbalance=""))[1]
        == "The ranks are balanced: none is waited for more than the others."
    )
    unheard = replace(found, imbalance="", paces=[], sent_bytes=0.0, why_not="the pace could not be heard")
    assert ranks_summary.remarks(unheard) == ["The pace could not be heard."]
    assert ranks_summary.rank_bars(replace(found, paces=[])) is None


def test_levers_by_name(recorded):
    first, second = map(summary.named_sentence, recorded("session").named)
    assert (
        first
        == "1.31x (1.20–1.40, n=4) as fast; after 10 losses its loss is 1.41, the plain program's is 1.38 (mean of the last 1)."
    )
    assert second == "not measured: the program does not survive it."
