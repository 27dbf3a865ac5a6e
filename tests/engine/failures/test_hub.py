"""The hub of the watch hears those who have the token, and keeps nothing of others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import psutil
import pytest

from lightswitch.errors import Failure
from lightswitch.failures import hub
from lightswitch.failures.classify import Rank, shortened
from lightswitch.failures.hub import LONGEST_LINE_BYTES, Hub, Route
from lightswitch.failures.verdict import Timeouts
from lightswitch.failures.watchdog import Member
from lightswitch.process import Process
from tests.night import at_night

TIMEOUTS = Timeouts(lost_after_seconds=1000, hung_after_seconds=1000)
LOCAL = Route("127.0.0.1", is_local=True)


@pytest.fixture
def rank_0() -> Iterator[Member]:
    member = Member(Rank(0, 2, "node1", 7), TIMEOUTS, Process(), lambda failure: None)
    yield member
    assert member._hub is not None
    with contextlib.suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(_end(member._hub), member._loop).result(20)
    member._loop.call_soon_threadsafe(member._loop.stop)
    while member._loop.is_running():
        time.sleep(0.01)
    member._loop.close()


async def _end(hub: Hub) -> None:
    hub.close()
    while len(asyncio.all_tasks()) > 1:  # of ranks that have not hung up yet
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("count", [400, *at_night(40)])
def test_what_strangers_send_is_not_kept(
    count: int, rank_0: Member, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "TOKEN_SECONDS", 300)  # a machine that stands still keeps a rank from sending it
    address, port, _ = rank_0.open_hub([LOCAL])
    before = psutil.Process().memory_info().rss
    hostile = [_connected(address, port) for _ in range(count)]
    for number, stranger in enumerate(hostile):
        with contextlib.suppress(OSError):
            stranger.send(b"x" * (31 if number % 2 else 1 << 20))  # some that wait, and some that send without end
    time.sleep(1)
    assert psutil.Process().memory_info().rss - before < 4 << 20
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert _joins(address, port, rank_0), "a rank is heard among them"
    for stranger in hostile:
        stranger.close()


def test_a_stranger_who_says_nothing_is_dropped(rank_0: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "TOKEN_SECONDS", 0.5)
    address, port, _ = rank_0.open_hub([LOCAL])
    with _connected(address, port) as stranger:
        stranger.settimeout(300)
        for _ in range(10):  # a byte at a time gives it no more time
            with contextlib.suppress(OSError):
                stranger.send(b"x")
            time.sleep(0.1)
        assert _is_hung_up(stranger)


@pytest.mark.parametrize("shown", ["{other}", '{{"token": "{token}"}}', " {token}", "{token_short}x"])
def test_nearly_the_token_is_not_the_token(shown: str, rank_0: Member) -> None:
    address, port, token = rank_0.open_hub([LOCAL])
    with _connected(address, port) as stranger:
        said = shown.format(other="0" * 32, token=token, token_short=token[:-1])
        stranger.sendall(f"{said:<32}".encode() + _hello(1))
        assert _is_hung_up(stranger)


@pytest.mark.parametrize("ranks", [512, *at_night(4096)])
def test_as_many_ranks_as_a_large_run_has_join_at_once_and_nobody_after_them(
    ranks: int, rank_0: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "TOKEN_SECONDS", 300)  # ranks that are dropped try again, and these do not
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(ranks, (hard - 1000) // 2)
    address, port, token = rank_0.open_hub([LOCAL] * (count - 1))

    async def join(number: int) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(address, port)
        writer.write(token.encode() + _hello(number))
        assert await reader.readline() == b'{"welcome": true}\n'
        return writer

    async def join_all() -> None:
        for writer in await asyncio.wait_for(asyncio.gather(*map(join, range(count))), 600):
            writer.close()
            await writer.wait_closed()

    asyncio.run(join_all())
    with pytest.raises(ConnectionRefusedError):
        _connected(address, port)


def test_nothing_is_pending_when_the_run_is_over(caplog: pytest.LogCaptureFixture) -> None:
    """Also where a rank does not hang up."""
    rank_0 = Member(Rank(0, 2, "node1", 7), TIMEOUTS, Process(), lambda failure: None)
    address, port, token = rank_0.open_hub([LOCAL])
    with _connected(address, port) as rank_1:
        rank_1.sendall(token.encode() + _hello(1) + b'{"leaves": true}\n')
        rank_0.join(rank_0.rank, address, port, token)
        rank_0.leave()
    assert not asyncio.all_tasks(rank_0._loop)
    rank_0._loop.close()  # refused while it runs


def test_the_longest_failure_fits_into_a_message() -> None:
    failure = shortened(Failure("\U0001f600" * 10**6, "\U0001f600" * 10**7))
    assert len(json.dumps({"failure": asdict(failure)})) < LONGEST_LINE_BYTES
    assert shortened(Failure("short", "details")) == Failure("short", "details")


SUSPENDED = """
import os, subprocess, time
from lightswitch.failures.classify import Rank
from lightswitch.failures.hub import Route
from lightswitch.failures.verdict import Timeouts
from lightswitch.failures.watchdog import Member
from lightswitch.process import Process

ranks = [Rank(number, 2, "node1", os.getpid()) for number in (0, 1)]
members = [Member(rank, Timeouts(2, 1000), Process(), lambda failure: None) for rank in ranks]
address, port, token = members[0].open_hub([Route("127.0.0.1", is_local=True)])
for member in members:
    member.join(ranks[0], address, port, token)
subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 6; kill -CONT {os.getpid()}"])
time.sleep(8)
print([member.verdict for member in members], flush=True)
members[1]._do(members[1]._close())  # it is lost, though nothing is suspended
members[0]._done.wait(60)
print(members[0].verdict, flush=True)
os._exit(0)
"""


@pytest.mark.nightly
def test_a_suspension_of_all_ranks_is_no_silence_and_a_rank_that_goes_after_it_is_missed() -> None:
    ran = subprocess.run([sys.executable, "-c", SUSPENDED], capture_output=True, text=True, timeout=200)
    assert re.match(r"\[None, None\]\n.*rank 1 of 2 on node1 failed", ran.stdout), ran.stdout + ran.stderr


OWN = socket.gethostbyname("localhost")


@pytest.mark.parametrize(
    ("routes", "address"),
    [
        ([LOCAL, Route("192.0.2.1", is_local=True)], "127.0.0.1"),
        ([LOCAL, Route(OWN, is_local=False)], OWN),
        ([LOCAL, Route("192.0.2.1", is_local=False)], None),  # not of this node, as it is translated on the way
        ([Route(OWN, is_local=False), Route("127.0.0.2", is_local=False)], None),
        ([LOCAL, None], None),
    ],
)
def test_the_hub_listens_where_all_ranks_reach_it(routes: list[Route | None], address: str | None) -> None:
    listener, found = hub.listen(routes)
    with listener:
        assert found == address
        assert listener.getsockname()[0] == (address or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0"))


def _connected(address: str | None, port: int) -> socket.socket:
    return socket.create_connection((address or "localhost", port), 300)


def _hello(number: int) -> bytes:
    return json.dumps({"rank": asdict(Rank(number, None, "node1", 7)), "oom_kills": 0}).encode() + b"\n"


def _joins(address: str | None, port: int, rank_0: Member) -> bool:
    assert rank_0._hub is not None
    with _connected(address, port) as rank:
        rank.settimeout(300)
        rank.sendall(rank_0._hub.auth.token.encode() + _hello(1))
        return rank.recv(100) == b'{"welcome": true}\n'


def _is_hung_up(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(100) == b""
    except ConnectionResetError:
        return True
