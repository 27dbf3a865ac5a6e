"""One writer of a run directory: processes of this machine, of containers on it, and of others."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightswitch.errors import Refused
from lightswitch.runs import lock
from tests.night import at_night

# takes the lock for each folder that it reads, and says how that went; what it has it keeps to its end
TAKER = """
import sys
from pathlib import Path
from lightswitch.errors import Refused
from lightswitch.runs import lock
held = []
for line in sys.stdin:
    try:
        held.append(lock.take(Path(line.strip()), on_lost=lambda told: print(told, flush=True)))
        print("taken", flush=True)
    except Refused as refused:
        print(refused, flush=True)
"""


class Taker:
    def __init__(self, *command: str, code: str = TAKER, cwd: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", code], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, folder: Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def take(self, folder: Path) -> str:
        self.ask(folder)
        return self.said()


@pytest.fixture
def takers() -> Iterator[list[Taker]]:
    started: list[Taker] = [Taker(), Taker()]
    yield started
    for taker in started:
        taker.process.kill()
        taker.process.communicate()


def _never(line: object) -> None:
    raise AssertionError(line)


@contextmanager
def _at_once() -> Iterator[None]:
    """Nobody may sleep here, however long it takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", _never)
        yield


def _until_ended(folder: Path) -> None:
    """Wait until the holder has closed its files, as the kernel does for one that was killed."""
    with (folder / lock.FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@pytest.mark.nightly
def test_of_two_at_once_exactly_one_has_it(takers: list[Taker], tmp_path: Path) -> None:
    for number in range(50):
        folder = tmp_path / str(number)
        if number % 2:  # where a dead process has left its own
            folder.mkdir()
            _left_by(folder, pid=2**22 + 1)
        for taker in takers:
            taker.ask(folder)
        said = [taker.said() for taker in takers]
        pid = takers[said.index("taken")].process.pid
        assert sum(f"is being written by process {pid} on " in answer for answer in said) == 1, said


def test_it_is_held_until_it_is_given_back_or_the_process_ends(takers: list[Taker], tmp_path: Path) -> None:
    held = lock.take(tmp_path, on_lost=_never)
    assert f"process {os.getpid()} on {os.uname().nodename}, since 20" in takers[0].take(tmp_path)
    held.release()
    assert list(tmp_path.iterdir()) == []
    assert takers[0].take(tmp_path / "mine") == "taken"
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")  # which is free
    assert takers[1].take(tmp_path / "copy") == "taken"
    takers[0].process.send_signal(signal.SIGSTOP)
    assert f"is being written by process {takers[0].process.pid} on " in takers[1].take(tmp_path / "mine")
    takers[0].process.kill()
    os.waitid(os.P_PID, takers[0].process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still a zombie
    assert takers[1].take(tmp_path / "mine") == "taken"


def test_a_process_that_has_the_same_number_later_is_another(tmp_path: Path) -> None:
    _left_by(tmp_path, pid=os.getpid(), started="1")
    lock.take(tmp_path, on_lost=_never).release()


# the process ends, and one that it has forked lives until there is a file
FORKER = """
import os, time
if os.fork() == 0:
    os.close(1)
    while not os.path.exists("waited_for"):
        time.sleep(0.02)
"""


def test_what_a_dead_process_has_forked_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parent = Taker(code=TAKER + FORKER, cwd=tmp_path)
    out, _ = parent.process.communicate(f"{tmp_path}/run\n")
    assert out == "taken\n"

    class EndsIt(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            (tmp_path / "waited_for").write_text(record.getMessage())

    lock.log.addHandler(handler := EndsIt())
    with caplog.at_level(logging.INFO):
        lock.take(tmp_path / "run", on_lost=_never).release()
    lock.log.removeHandler(handler)
    told = (tmp_path / "waited_for").read_text()
    assert told.startswith(f"waiting    for remaining child processes of process {parent.process.pid} on ")


def test_a_holder_in_a_container_of_this_machine_is_seen(takers: list[Taker], tmp_path: Path) -> None:
    unshare = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no new namespaces here")
    contained = Taker(*unshare)
    takers.append(contained)
    assert contained.take(tmp_path) == "taken"
    assert "is being written by process 1 on " in takers[0].take(tmp_path)
    contained.process.kill()
    _until_ended(tmp_path)
    assert takers[0].take(tmp_path) == "taken"


@pytest.mark.parametrize("ahead_seconds", [3000, *at_night(0)])
def test_a_silent_holder_on_another_machine_is_dead_also_where_its_clock_is_ahead(
    ahead_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_SILENT_SECONDS", 2.0)
    path = _left_by(tmp_path, host="far", boot="another")
    os.utime(path, (time.time() + ahead_seconds,) * 2)
    start = time.monotonic()
    held = lock.take(tmp_path, on_lost=_never)
    assert 1.5 < time.monotonic() - start < 1000
    assert json.loads(path.read_text())["host"] == os.uname().nodename
    held.release()


def test_one_that_has_been_silent_for_long_is_taken_over_at_once(tmp_path: Path) -> None:
    path = _left_by(tmp_path, host="far", boot="another")
    os.utime(path, (time.time() - 100,) * 2)
    with _at_once():
        lock.take(tmp_path, on_lost=_never).release()


def test_one_whose_heart_beats_is_not(tmp_path: Path) -> None:
    path = _left_by(tmp_path, host="far", boot="another")
    beat = threading.Timer(0.5, path.touch)
    beat.start()
    with pytest.raises(Refused, match="is being written by process 17 on far, since 2026-11-21 10:00:00; wait until"):
        lock.take(tmp_path, on_lost=_never)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"SLURM_JOB_ID": "17"}, {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, {"TORCHELASTIC_RESTART_COUNT": "1"}),
    ],
    ids=["Slurm's requeue", "torchrun's restart"],
)
def test_a_job_that_is_started_again_elsewhere_takes_it_at_once(
    before: dict[str, str], now: dict[str, str], tmp_path: Path
) -> None:
    _left_by(tmp_path, host="far", boot="another", starts=lock.starts_of(before))
    with _at_once():
        lock.take(tmp_path, on_lost=_never, environ=now).release()


def test_two_torchruns_of_one_id_are_two(tmp_path: Path) -> None:
    mine = {"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "far"}
    path = _left_by(tmp_path, host="far", boot="another", starts=lock.starts_of(mine))
    threading.Timer(0.5, path.touch).start()
    with pytest.raises(Refused):
        lock.take(tmp_path, _never, environ=mine | {"TORCHELASTIC_RESTART_COUNT": "1", "MASTER_ADDR": "near"})


def test_a_holder_learns_that_a_node_of_its_torchrun_is_in_another_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock, "_SETTLE_SECONDS", 0.1)
    mine = {"TORCHELASTIC_RUN_ID": "mine", "PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "head:29500"}
    asked = threading.Event()
    held = lock.take(tmp_path, _never, asked.set, mine)
    elsewhere = {
        "other id": mine | {"TORCHELASTIC_RUN_ID": "other"},
        "other store": mine | {"PET_RDZV_ENDPOINT": "b:1"},
    }
    for environ in elsewhere.values():
        with pytest.raises(Refused, match="give this run another run_id"):
            lock.take(tmp_path, _never, environ=environ)
    assert not asked.wait(0.5)
    with pytest.raises(Refused, match=f"process {os.getpid()} on .* from the same torchrun job; the nodes"):
        lock.take(tmp_path, _never, environ=mine)
    assert asked.wait(300)
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_stood_still_learns_that_it_was_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_SETTLE_SECONDS", 0.1)
    told: list[str] = []
    held = lock.take(tmp_path, on_lost=told.append)
    path = _left_by(tmp_path, host="far", boot="another")
    while not told:
        time.sleep(0.05)
    assert told == [
        "process 17 on far, since 2026-11-21 10:00:00 has taken over the run directory, so this process ends"
    ]
    held.release()
    assert path.exists(), "it is the other's"


def test_one_that_is_damaged_is_nobodys(tmp_path: Path) -> None:
    for content in (b"", b'{"host": "fa', b"\xff\xfe", b"[]"):
        (tmp_path / lock.FILE).write_bytes(content)
        lock.take(tmp_path, on_lost=_never).release()
    for pid in ("abc", None, -1, 0, 1.5, 2**70, [17]):
        _left_by(tmp_path, pid=pid)
        lock.take(tmp_path, on_lost=_never).release()


def _left_by(folder: Path, **other: object) -> Path:
    """The lock of a process that has gone, or is elsewhere."""
    path = folder / lock.FILE
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    own = lock.this_process(folder, descriptor, {})
    os.close(descriptor)
    left = dataclasses.replace(own, **({"pid": 17, "started": "1", "since": "2026-11-21 10:00:00"} | other))
    path.write_text(json.dumps(dataclasses.asdict(left)))
    return path


def test_a_run_whose_directory_is_removed_is_told_though_a_logger_makes_it_anew(tmp_path: Path) -> None:
    told: queue.Queue[str] = queue.Queue()
    held = lock.take(tmp_path / "run", on_lost=told.put)
    (tmp_path / "run").rename(tmp_path / "removed")
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    assert told.get(timeout=60).endswith("run was removed while the run wrote to it; start the run again")
    held.release()
