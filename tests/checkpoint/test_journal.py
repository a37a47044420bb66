"""A journal returns the appended data, up to any recorded position, or the reason why it cannot."""

from __future__ import annotations

import math
import os
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.checkpoint import journal
from flatout.checkpoint.journal import JournalEntries, JournalPosition, ValueJournal, read_journal
from flatout.schema.errors import SaveError, StorageError

LONG = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(allow_nan=True)


@st.composite
def entries(draw):
    codes = draw(st.binary(max_size=20))
    found = JournalEntries(
        bytearray(codes), bytearray(draw(st.binary(min_size=len(codes), max_size=len(codes))))
    )
    found.floats.extend(draw(st.lists(FLOATS, max_size=5)))
    found.integers.extend(draw(st.lists(LONG, max_size=5)))
    found.longer.extend(draw(st.lists(st.binary(max_size=40), max_size=4)))
    return found


def columns(found):
    return (
        bytes(found.codes),
        bytes(found.checks),
        found.floats.tobytes(),
        list(found.integers),
        list(found.longer),
    )


def together(blocks):
    whole = JournalEntries()
    for block in blocks:
        whole.take_up(block.to_bytes())
    return columns(whole)


@given(blocks=st.lists(entries(), max_size=4), at=st.integers(0, 4))
def test_appended_data_is_read_up_to_a_position(tmp_path_factory, blocks, at):
    path = tmp_path_factory.mktemp("journal") / "j"
    writer, places = ValueJournal(path), []
    places.append(writer.place)
    for block in blocks:
        writer.append(block)
        places.append(writer.place)
    writer.close()
    at = min(at, len(blocks))
    assert columns(read_journal(path, places[at])) == together(blocks[:at])
    again = ValueJournal(path, places[at])  # later data is cut off
    again.append(JournalEntries(bytearray(b"\1"), bytearray(b"\2")))
    assert bytes(read_journal(path, again.place).codes)[-1:] == b"\1"
    assert len(read_journal(path, again.place).codes) == sum(len(block.codes) for block in blocks[:at]) + 1
    again.close()


@given(where=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(tmp_path_factory, where, bit):
    path = tmp_path_factory.mktemp("journal") / "j"
    writer = ValueJournal(path)
    for number in range(3):
        block = JournalEntries(bytearray(b"abc"), bytearray(b"xyz"), longer=[b"long" * number])
        block.floats.extend([1.5, math.inf])
        writer.append(block)
    writer.close()
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(SaveError, match=r"journal|is not"):
        read_journal(path, writer.place)


def test_a_truncated_or_foreign_journal_is_rejected(tmp_path):
    writer = ValueJournal(tmp_path / "j")
    writer.append(JournalEntries(bytearray(b"a"), bytearray(b"b")))
    os.truncate(tmp_path / "j", writer.place.bytes - 1)
    with pytest.raises(SaveError, match="bytes, and the checkpoint was made at"):
        read_journal(tmp_path / "j", writer.place)
    other = ValueJournal(tmp_path / "k")
    other.append(JournalEntries(bytearray(b"c"), bytearray(b"d")))
    with pytest.raises(SaveError, match="another run"):
        read_journal(tmp_path / "k", JournalPosition(other.place.bytes, other.place.digest ^ 1))
    with pytest.raises(SaveError, match="cannot be read"):
        read_journal(tmp_path / "none", other.place)
    with pytest.raises(SaveError, match="position"):
        JournalPosition.from_json({"bytes": "1", "digest": 0})


def test_columns_with_a_wrong_length_are_rejected(tmp_path):
    payload = bytearray(JournalEntries(bytearray(b"a"), bytearray(b"b"), longer=[b"xyz"]).to_bytes())
    for at in range(0, 16, 4):
        broken = bytes(payload[:at]) + b"\xff\xff\xff\x7f" + bytes(payload[at + 4 :])
        path = tmp_path / str(at)
        digest = zlib.crc32(broken)
        path.write_bytes(journal.HEADER + journal.BLOCK.pack(len(broken), digest) + broken)
        with pytest.raises(SaveError, match="corrupt"):
            read_journal(path, JournalPosition(path.stat().st_size, digest))


def test_a_journal_has_a_size_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MOST_BYTES", 100)
    writer = ValueJournal(tmp_path / "j")
    with pytest.raises(StorageError, match="would exceed"):
        writer.append(JournalEntries(longer=[b"x" * 200]))
