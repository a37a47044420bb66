"""The certificate of a confirmed plan: what its verdict was made from."""

from dataclasses import dataclass
from typing import Any

from flatout.schema.records import Ratio, Record

CERTIFICATE_SCHEMA = 1


@dataclass
class CertifiedRun(Record):
    """Fields of a TrialRecord, which the guard compared."""

    seed: int
    warmup_steps: int
    steps: int
    losses: list[str]
    loss_steps: list[int]
    weights_digests: dict[str, str]
    batch_hashes: list[str]


@dataclass
class CertificateRecord(Record):
    """What the verdict on a plan was made from. It names no absolute path.

    ``plain[i]`` and ``tuned[i]`` had the same seed. ``key`` has the digests of your files, the versions and the
    machine. ``repeatable``: a plain run repeats its own losses."""

    command: list[str]
    key: dict[str, str]
    plan: dict[str, Any]
    verdict: str  # of the guard: same or equivalent
    why: str
    repeatable: bool
    speedup: Ratio | None  # None beside other programs
    plain: list[CertifiedRun]
    tuned: list[CertifiedRun]
    schema: int = CERTIFICATE_SCHEMA


@dataclass
class VerifiedLine(Record):
    """A claim of a certificate. ``status``: holds, FAILED, not checked, differs or not claimed."""

    name: str
    status: str
    why: str


@dataclass
class VerificationRecord(Record):
    """Output of `flatout verify --json`."""

    holds: bool
    lines: list[VerifiedLine]
    schema: int = CERTIFICATE_SCHEMA
