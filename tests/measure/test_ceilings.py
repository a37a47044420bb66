"""Ceilings are stored per machine, read per device, and never taken from another machine."""

import dataclasses
import json

import pytest

from flatout.measure.bench import rate
from flatout.measure.ceilings import load, machine_key, read, record_path, save
from flatout.schema.facts import Facts, Gpu
from flatout.schema.machine_snapshot import Ceiling, CeilingsRecord

HERE = Facts(
    cpu="AMD EPYC", cores=2, gpus=(Gpu("NVIDIA H100", 80 * 2**30, (9, 0)),), versions={"torch": "2.14.1"}
)


def record():
    return CeilingsRecord(
        key=machine_key(HERE),
        ceilings=[
            Ceiling("matmul_float32_flops", "cuda", 5e13, 4e13, 6e13, 7),
            Ceiling("matmul_float32_flops", "cpu", 1e11, 1e11, 1e11, 7),
            Ceiling("memory_bytes_per_s", "cpu", 2e10),
            Ceiling("matmul_tf32_flops", "cpu", note="not run: no Tensor Cores"),
        ],
    )


def test_by_device(tmp_path):
    assert load(HERE, folder=tmp_path) is None
    save(record(), tmp_path)
    assert load(HERE, "cpu", tmp_path) == {
        "matmul_float32_flops": 1e11,
        "memory_bytes_per_s": 2e10,
    }
    assert load(HERE, "cuda", tmp_path) == {"matmul_float32_flops": 5e13}
    assert read(HERE, tmp_path) == record()


@pytest.mark.parametrize(
    "change", [{"cpu": "Intel"}, {"cores": 4}, {"gpus": ()}, {"versions": {"torch": "2.13.0"}}]
)
def test_another_machine_has_its_own(tmp_path, change):
    save(record(), tmp_path)
    assert load(dataclasses.replace(HERE, **change), folder=tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"key": 1}',
        '{"key": "KEY", "ceilings": 3}',
        '{"key": "KEY", "schema": 99, "ceilings": []}',
        '{"key": "KEY", "ceilings": [1]}',
    ],
)
def test_an_invalid_record_is_none(tmp_path, text):
    record_path(machine_key(HERE), tmp_path).write_text(
        text.replace("KEY", machine_key(HERE)), encoding="utf-8"
    )
    assert load(HERE, folder=tmp_path) is None


def test_a_record_copied_from_another_machine_is_none(tmp_path):
    other = dataclasses.replace(record(), key="0123456789ab")
    record_path(machine_key(HERE), tmp_path).write_text(json.dumps(other.to_json()), encoding="utf-8")
    assert load(HERE, folder=tmp_path) is None


def test_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert record_path("abc") == tmp_path / "flatout" / "ceilings-abc.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification: only absolute paths count
    monkeypatch.setenv("HOME", "/home/ada")
    assert str(record_path("abc")) == "/home/ada/.cache/flatout/ceilings-abc.json"


def test_a_rate_is_the_best_with_quartiles():
    found = rate("x_bytes_per_s", "cpu", 1000.0, [1.0, 2.0, 4.0], "")
    assert (found.value, found.n) == (1_000_000.0, 3)
    assert found.low == pytest.approx(375_000.0)
    assert found.high == pytest.approx(750_000.0)
