"""Nodes observe each other through a real store, with fast heartbeats."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from flatout.launch import node_heartbeats
from flatout.launch.node_heartbeats import HeartbeatMonitor
from flatout.launch.nodes import Endpoint
from flatout.launch.rendezvous import claimed, client, served

torch = pytest.importorskip("torch")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(node_heartbeats, "ANSWER_S", 0.05)
    monkeypatch.setattr(node_heartbeats, "LOST_S", 0.5)


@pytest.fixture
def job(quick):
    """The serving node of two, a second one that sends heartbeats, and the messages."""
    listening = claimed(Endpoint("127.0.0.1", 0), 0, several=True)
    at = Endpoint("127.0.0.1", listening.getsockname()[1])
    store, gone = served(torch, listening), []
    first = HeartbeatMonitor(
        store, SimpleNamespace(name="a", others=["b"], number=1), at, True, gone.append, lambda: None
    )
    second = HeartbeatMonitor(
        client(torch, at),
        SimpleNamespace(name="b", others=["a"], number=1),
        at,
        False,
        lambda _: None,
        lambda: None,
    )
    first.start()
    second.start()
    yield SimpleNamespace(first=first, second=second, gone=gone, store=store)
    for each in (first, second):
        each._over.set()
        each.join()


def info(job, seconds: float = 10.0) -> bool:
    pause = threading.Event()
    return any(job.gone or pause.wait(0.05) for _ in range(round(seconds / 0.05)))


@pytest.mark.slow
def test_a_node_without_heartbeats_is_reported_once(job):
    assert not info(job, 1.0)
    job.second._over.set()  # as if it were killed: it sends nothing
    assert info(job)
    threading.Event().wait(1.0)
    assert job.gone == ["b"]
    assert job.first.ended_round


@pytest.mark.slow
def test_a_node_that_is_done_is_not_missed(job):
    assert not info(job, 0.3)
    job.second.finish()
    assert not info(job, 1.5)


def test_the_serving_node_waits_for_the_others(job):
    ending = threading.Thread(target=job.first.finish)
    ending.start()
    ending.join(1.0)
    assert ending.is_alive()  # its store is the other's, too
    job.second.finish()
    ending.join(10.0)
    assert not ending.is_alive()
    assert not job.gone
    assert not job.first.ended_round


def test_the_serving_node_does_not_wait_for_one_that_is_gone(job):
    job.second._over.set()
    job.second.join()
    ending = threading.Thread(target=job.first.finish)
    ending.start()
    ending.join(10.0)
    assert not ending.is_alive()


def test_a_node_without_an_answer_is_cut_off(quick):
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = Endpoint("127.0.0.1", server.getsockname()[1])
    cut = threading.Event()
    node = HeartbeatMonitor(
        None, SimpleNamespace(name="b", others=[], number=1), at, False, lambda _: None, cut.set
    )
    node.start()
    assert cut.wait(10.0)
