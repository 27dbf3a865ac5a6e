"""How a process of a run leaves, and what can't be sent to one that Python spawns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from torch import nn

from lightswitch.errors import ExitCode, Stopped
from lightswitch.failures.launchers import first_unpicklable
from lightswitch.process import Process, Signals, ended_by
from tests.engine.conftest import PLAIN, Train
from tests.engine.plain import PlainModel

LEAVES = """
import sys, threading, time
from lightswitch.process import Process
print("a line that nobody reads")
threading.Thread(target=Process().leave_now, args=(7,)).start()
time.sleep(60)
"""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def test_a_process_leaves_at_once_though_its_output_has_no_reader() -> None:
    read, write = os.pipe()
    os.close(read)
    left = subprocess.run([sys.executable, "-c", LEAVES], stdout=write, env=_environment(), timeout=50)
    os.close(write)
    assert left.returncode == 7


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


@pytest.mark.parametrize(
    ("code", "told"), [(3, "ended with exit code 3"), (-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")]
)
def test_how_a_process_ended_is_told_for_every_signal(code: int, told: str) -> None:
    assert ended_by(code) == told


def test_rank_0_asks_once_that_its_job_be_started_again_and_all_exit_with_its_code() -> None:
    asked = []

    def requeue(stopped: Stopped, is_asking: bool) -> Stopped:
        asked.append(is_asking)
        stopped.exit_code = ExitCode.REQUEUE
        return stopped

    signals = Signals(Process(), requeue)
    signals.is_first = True
    codes = [signals.end_by(Stopped(signal.SIGUSR1)).exit_code for _ in range(2)]
    assert asked == [True, False]
    assert codes == [ExitCode.REQUEUE, ExitCode.REQUEUE]


# What can't be sent to a process that Python spawns is named before one is started


class WithLambda(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.Sequential(nn.Identity()))
        self.net[1][0].twice = lambda x: 2 * x


def test_a_part_that_can_not_be_pickled_is_named_in_a_line(train: Train) -> None:
    module = "model._target_=tests.engine.failures.test_process.WithLambda"
    run = train(*PLAIN, module, "strategy=ddp_spawn", "trainer.devices=2", check=False)
    assert run.returncode == 2
    assert run.err == (
        "error: model.net.1.0.twice is a lambda, which can't be sent to the processes that strategy=ddp_spawn starts; "
        "use strategy=ddp, which builds the model in each\n"
    )


def test_so_is_one_of_a_local_class() -> None:
    class Local(nn.Identity):
        pass

    says = "get" if sys.version_info >= (3, 13) else "pickle"
    told = first_unpicklable({"model": nn.Sequential(nn.Identity(), Local())})
    assert told == f"model.1: Can't {says} local object '{test_so_is_one_of_a_local_class.__name__}.<locals>.Local'"
