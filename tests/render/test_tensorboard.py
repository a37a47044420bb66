"""The TensorBoard log of a profile, as TensorBoard itself reads it."""

import pytest
from pages import ill

from flatout.cli.profile import write_log

pytest.importorskip("tensorboard")


def test_tensorboard_reads_the_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = ill()
    write_log(record, tmp_path / "log")
    log = EventAccumulator(str(tmp_path / "log")).Reload()
    assert [round(event.value, 3) for event in log.Scalars("step_ms")] == [
        round(ms, 3) for ms in record.step_ms_list
    ]
    assert log.Scalars("phases/forward_ms")[0].value == pytest.approx(3.5)
    assert log.Scalars("what_ifs/loader")[0].value == pytest.approx(1.8)
    assert log.Scalars("memory/parameters_bytes")
    assert len(log.Scalars("memory/after_each_step_bytes")) == 14
