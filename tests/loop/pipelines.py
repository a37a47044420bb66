"""Whether this torch can run pipelines of micro-batches that are already split: since 2.14."""

import inspect

import pytest
from torch.distributed.pipelining.schedules import ScheduleGPipe

THERE_ARE = "arg_mbs" in inspect.signature(ScheduleGPipe.step).parameters
need_them = pytest.mark.skipif(not THERE_ARE, reason="not run: pipelines need torch 2.14")
