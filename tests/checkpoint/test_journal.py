"""A journal returns the appended data, up to any recorded position, or the reason why it cannot."""

import json
import os
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.checkpoint.resume import value_log as journal
from flatout.checkpoint.resume.value_log import JournalPosition, ValueJournal, is_written, read_journal
from flatout.schema.errors import CheckpointError, StorageError

VALUES = st.one_of(
    st.none(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9), st.lists(st.integers())
)
ENTRIES = st.lists(st.tuples(st.integers(0, 255), VALUES), max_size=9)


def append(writer, entries):
    writer.append(bytes(check for check, _ in entries), [json.dumps(value) for _, value in entries])
    return writer.position


def joined(blocks):
    entries = [entry for block in blocks for entry in block]
    return bytes(check for check, _ in entries), [value for _, value in entries]


@given(blocks=st.lists(ENTRIES, max_size=4), at=st.integers(0, 4))
def test_appended_data_is_read_up_to_a_position(tmp_path_factory, blocks, at):
    path = tmp_path_factory.mktemp("journal") / "j"
    writer = ValueJournal(path)
    positions = [writer.position, *(append(writer, block) for block in blocks)]
    writer.close()
    at = min(at, len(blocks))
    assert read_journal(path, positions[at]) == joined(blocks[:at])
    again = ValueJournal(path, positions[at])  # later data is cut off
    append(again, [(2, "last")])
    assert read_journal(path, again.position) == joined([*blocks[:at], [(2, "last")]])
    again.close()


@given(where=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(tmp_path_factory, where, bit):
    path = tmp_path_factory.mktemp("journal") / "j"
    writer = ValueJournal(path)
    for number in range(3):
        append(writer, [(1, "long" * number), (2, 1.5)])
    writer.close()
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"journal|is not"):
        read_journal(path, writer.position)


def test_an_invalid_journal_is_rejected(tmp_path, monkeypatch):
    path = tmp_path / "j"
    writer = ValueJournal(path)
    position = append(writer, [(1, 2)])
    with pytest.raises(CheckpointError, match="another run"):
        read_journal(path, JournalPosition(position.bytes, position.digest ^ 1))
    os.truncate(path, position.bytes - 1)
    with pytest.raises(CheckpointError, match="bytes, and the checkpoint was made at"):
        read_journal(path, position)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_journal(tmp_path / "none", position)
    with pytest.raises(CheckpointError, match="position"):
        JournalPosition.from_json({"bytes": "1", "digest": 0})
    for content in (b"no JSON", b"[]", b'["00",[]]', b'["zz",[1]]', b'[["0"],[1]]'):
        payload = zlib.compress(content)
        digest = zlib.crc32(payload)
        path.write_bytes(journal.HEADER + journal.BLOCK.pack(len(payload), digest) + payload)
        with pytest.raises(CheckpointError, match="corrupt"):
            read_journal(path, JournalPosition(path.stat().st_size, digest))
    monkeypatch.setattr(journal, "MAX_BYTES", 100)
    with pytest.raises(StorageError, match="would exceed"):
        writer.append(b"", [json.dumps(os.urandom(200).hex())])


def test_a_journal_is_written_until_its_run_ends(tmp_path):
    """Two runs of one command share a folder; the later one must not delete the journal of the other."""
    path = tmp_path / "j"
    assert not is_written(path)
    writer = ValueJournal(path)
    assert is_written(path)
    writer.close()
    assert not is_written(path)
    again = ValueJournal(path, writer.position)
    assert is_written(path)
    again.close()
