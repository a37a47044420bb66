"""The connection between a program and its parent."""

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.trial.channel import Channel, Hangup

text = st.text(st.characters(exclude_categories=("Cs",)))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=10,
)


@pytest.fixture
def pair():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channels = Channel(left), Channel(right)
    yield channels
    for channel in channels:
        channel.close()


@given(st.lists(st.dictionaries(text, values, max_size=3), max_size=6))
def test_messages_arrive_whole_and_in_order(messages):
    left, right = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    for message in messages:
        left.send(message)
    assert [right.receive(1.0) for _ in messages] == messages
    left.close()
    right.close()


def test_a_message_larger_than_the_buffer(pair):
    left, right = pair
    message = {"ms": [1.5] * 300_000}
    sender = threading.Thread(target=left.send, args=(message,))
    sender.start()
    assert right.receive(20.0) == message
    sender.join()


def test_no_message_is_a_timeout_and_nothing_is_lost(pair):
    left, right = pair
    with pytest.raises(TimeoutError):
        right.receive(0.01)
    left._socket.sendall(b'{"a":')
    with pytest.raises(TimeoutError):
        right.receive(0.01)
    left._socket.sendall(b" 1}\n")
    assert right.receive(1.0) == {"a": 1}


def test_the_end_of_the_line(pair):
    left, right = pair
    left.send({"last": True})
    left.close()
    assert right.receive(1.0) == {"last": True}
    with pytest.raises(Hangup):
        right.receive(1.0)
    with pytest.raises(Hangup):
        right.send({"x": "y" * 1_000_000})
