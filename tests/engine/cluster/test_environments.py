"""The port at which the processes that one process starts will meet."""

from __future__ import annotations

import pickle
import socket

import pytest

from lightswitch.cluster.environments import LocalEnvironment


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> LocalEnvironment:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    return LocalEnvironment()


def test_nobody_is_given_the_port_of_a_run_before_its_rank_0_listens(local: LocalEnvironment) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", local.main_port))  # what the kernel asks of itself for a port it hands out


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_rank_0_can_listen_there(local: LocalEnvironment, address: str) -> None:
    with socket.create_server((address, local.main_port)):
        socket.create_connection(("127.0.0.1", local.main_port)).close()


def test_ranks_that_are_spawned_are_told_its_number(local: LocalEnvironment) -> None:
    port = local.main_port
    assert pickle.loads(pickle.dumps(local)).main_port == port != LocalEnvironment().main_port


def test_a_port_that_was_given_is_not_another(local: LocalEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29511")
    assert local.main_port == 29511
