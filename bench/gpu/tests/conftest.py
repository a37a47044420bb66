"""Tests of the tools for benchmarks on a GPU: ``pytest bench/gpu/tests``; `make full` runs them, too."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[3] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "rehearsal"), str(Path(__file__).resolve().parents[1])]
