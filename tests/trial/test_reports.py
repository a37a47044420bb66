"""What levers report about a program is not mixed with what they report about flatout's own loaders."""

from types import SimpleNamespace

import pytest

from flatout.trial.worker_commands import StopTrial, finish


def test_a_check_of_our_own_adds_no_report():
    context = SimpleNamespace(paused=False, reports=[("graphs", "a shape changed")])

    def fetch():
        context.reports.append(("resident_data", "hardly any sample fits"))
        return [[[0.0] * 4]]

    worker = SimpleNamespace(
        context=context,
        sample_probe=SimpleNamespace(fetch=fetch),
        write_record=lambda *_: None,
        send=lambda _: None,
    )
    with pytest.raises(StopTrial):
        finish(worker, fetch_samples=True)
    assert context.reports == [("graphs", "a shape changed")]
    assert worker.fetched_samples
