"""One writer of a run directory: processes of this machine, what they have forked, and file systems without flock."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightswitch.errors import Refused
from lightswitch.runs import claim

# takes the lock for each folder that it reads, and says how that went; what it has it keeps to its end
TAKER = """
import sys
from pathlib import Path
from lightswitch.errors import Refused
from lightswitch.runs import claim
held = []
for line in sys.stdin:
    try:
        held.append(claim.lock(Path(line.strip())))
        print("taken", flush=True)
    except Refused as refused:
        print(refused, flush=True)
"""


class Taker:
    def __init__(self, code: str = TAKER, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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


def test_it_is_held_until_it_is_given_back_or_the_process_ends(takers: list[Taker], tmp_path: Path) -> None:
    release = claim.lock(tmp_path)
    assert f"process {os.getpid()} on {os.uname().nodename}, since 20" in takers[0].take(tmp_path)
    release()
    assert list(tmp_path.iterdir()) == []
    assert takers[0].take(tmp_path / "mine") == "taken"
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")  # which is free
    assert takers[1].take(tmp_path / "copy") == "taken"
    takers[0].process.send_signal(signal.SIGSTOP)
    assert f"is being written by process {takers[0].process.pid} on " in takers[1].take(tmp_path / "mine")
    takers[0].process.kill()
    os.waitid(os.P_PID, takers[0].process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still a zombie
    assert takers[1].take(tmp_path / "mine") == "taken"


# the process ends, and one that it has forked lives until there is a file
FORKER = """
import os, time
if os.fork() == 0:
    os.close(1)
    while not os.path.exists(os.environ["UNTIL"]):
        time.sleep(0.02)
"""


def _waiting_ends(waited_for: Path) -> logging.Handler:
    class Ends(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waited_for.write_text(record.getMessage())

    return Ends()


def test_what_a_dead_process_has_forked_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parent = Taker(TAKER + FORKER, UNTIL=str(tmp_path / "waited_for"))
    out, _ = parent.process.communicate(f"{tmp_path}/run\n")
    assert out == "taken\n"
    claim.log.addHandler(handler := _waiting_ends(tmp_path / "waited_for"))
    with caplog.at_level(logging.INFO):
        claim.lock(tmp_path / "run")()
    claim.log.removeHandler(handler)
    assert (tmp_path / "waited_for").read_text().startswith(f"waiting    for process {parent.process.pid} on ")


def test_a_job_that_is_started_again_waits_for_its_earlier_start_and_no_other_does(
    takers: list[Taker], tmp_path: Path
) -> None:
    mine = {"SLURM_JOB_ID": "17", "ENVIRONMENT": "BATCH"}
    takers += [Taker(**mine), Taker(**mine)]
    assert takers[2].take(tmp_path) == "taken"
    assert "is being written by" in takers[0].take(tmp_path)
    takers[3].ask(tmp_path)
    time.sleep(0.5)
    takers[2].process.kill()
    assert takers[3].said() == "taken"


def test_a_file_system_without_flock_names_the_file_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    release = claim.lock(tmp_path)
    with pytest.raises(Refused, match=rf"by process {os.getpid()} on .*; if it was killed, type rm \S+\.lock\.only: "):
        claim.lock(tmp_path)
    release()
    claim.lock(tmp_path)()
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_damaged_is_nobodys(tmp_path: Path) -> None:
    for content in (b"", b'{"host": "fa', b"\xff\xfe", b"[]"):
        (tmp_path / claim.LOCK).write_bytes(content)
        claim.lock(tmp_path)()


def test_a_directory_is_removed_though_a_logger_makes_it_anew(tmp_path: Path) -> None:
    release = claim.lock(tmp_path / "run")
    assert not claim.is_removed(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "removed")
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    assert claim.is_removed(tmp_path / "run")
    release()
