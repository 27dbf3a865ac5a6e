"""A process that has to end does, whoever reads what it prints, and asks once that its job be started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from lightswitch.errors import ExitCode, Stopped
from lightswitch.process import Process, Signals, ended_by

LEAVES = """
import sys, threading, time
from lightswitch.process import Process
print("a line that nobody reads")
threading.Thread(target=Process().leave_now, args=(7,)).start()
time.sleep(60)
"""

ENDS_SLOWLY = """
import os, signal, sys, time
from lightswitch import process
process._PATIENCE_SECONDS = 0.2
signals = process.Signals(process.Process())
signals.catch(is_first=True)
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
except process.Stopped:
    if sys.argv[1] == "told":
        signals.note_told()
    time.sleep(60)
"""

FORKS = """
import multiprocessing, os, signal, subprocess
from lightswitch.process import Process, Signals
signals = Signals(Process())
signals.catch(is_first=True)
forked, child = os.pipe()
wait = lambda: (os.write(child, b"x"), signal.pause(), signal.pause())
other = multiprocessing.get_context("fork").Process(target=wait)
other.start()
os.read(forked, 1)
os.kill(other.pid, signal.SIGUSR1)
other.terminate()
other.join(20)
program = subprocess.Popen(["sleep", "30"], preexec_fn=os.setsid)
program.send_signal(signal.SIGINT)
print(other.exitcode, program.wait(20), signals.received, flush=True)
other.kill()
"""

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
child.wait()
"""
CHILD = """
import time
from lightswitch.process import Process
Process().follow_parent(is_child=False)
print("follows", flush=True)
time.sleep(600)
"""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def test_a_process_leaves_at_once_though_the_reader_of_its_output_has_stopped() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    while True:  # fill the pipe
        try:
            os.write(write, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write, True)
    left = subprocess.run([sys.executable, "-c", LEAVES], stdout=write, env=_environment(), timeout=50)
    os.close(read)
    os.close(write)
    assert left.returncode == 7


@pytest.mark.parametrize(("said", "line"), [("told", ""), ("", "stopped    by SIGTERM, at once\n")])
def test_what_ends_a_process_that_ends_slowly_is_told_once(said: str, line: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_SLOWLY, said], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stderr) == (143, line)


def test_a_forked_child_ends_by_sigterm_alone_and_its_parent_does_not() -> None:
    forked = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=100)
    assert forked.stdout == "-15 -2 None\n", forked.stderr


def test_a_process_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=_environment(), text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline().split()[0]))
        parent.kill()
    child.wait(timeout=60)


@pytest.mark.parametrize(
    ("code", "told"), [(3, "ended with exit code 3"), (-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")]
)
def test_how_a_process_ended_is_told_for_every_signal(code: int, told: str) -> None:
    assert ended_by(code) == told


def test_rank_0_asks_once_that_its_job_be_started_again_and_all_exit_with_its_code() -> None:
    asked = []

    def requeue(stopped: Stopped, is_asking: bool, has_trained: bool) -> Stopped:
        asked.append(is_asking)
        stopped.exit_code = ExitCode.REQUEUE
        return stopped

    signals = Signals(Process(), requeue)
    signals.is_first = True
    codes = [signals.end_by(Stopped(signal.SIGUSR1)).exit_code for _ in range(2)]
    assert asked == [True, False]
    assert codes == [ExitCode.REQUEUE, ExitCode.REQUEUE]
