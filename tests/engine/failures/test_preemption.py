"""A signal ends a run where it can end: at a step, in a checkpoint, on all ranks; and the run goes on from there."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, PLAIN, Finished, Train, runs_in
from tests.engine.failures.failing import FAILING_MODEL
from tests.engine.failures.pace import PACE_TARGET
from tests.engine.processes import TRAIN_PY, shown_by
from tests.night import at_night

STEPS = 40
RUN = (
    *PLAIN,
    "run_id=mine",
    "trainer.accelerator=cpu",
    "global_batch_size=24",
    f"trainer.max_steps={STEPS}",
    "trainer.val_check_interval=7",
    "trainer.log_every_n_steps=1",
    "callbacks.last_checkpoint.every_n_steps=100",
    PACE_TARGET,
)
SLOWLY, HANGING = "callbacks.pace.seconds=0.5", "callbacks.pace.seconds=1000"
FAST = "callbacks.pace.seconds=0"
ASKS = ("callbacks.asks._target_=tests.engine.failures.pace.Asks",)


class Asks:
    """Sends a signal to one of the processes once there is a certain file, and after some seconds; notes when."""

    def __init__(self, number: int, rank: int = 0, file: Path | None = None, seconds: float = 0.2):
        self.number, self.rank, self.file, self.seconds = number, rank, file, seconds

    def __call__(self, processes: list[BaseProcess]) -> None:
        deadline = time.monotonic() + 600
        while self.file is not None and not self.file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(self.seconds)
        os.kill(processes[self.rank].pid or 0, self.number)
        self.asked = time.time()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("uninterrupted"))(*RUN, FAST, "strategy=single")


@pytest.mark.parametrize(
    ("strategy", "ranks", "number", "code"),
    [
        ("single", 0, signal.SIGINT, 130),
        ("fsdp", 2, signal.SIGUSR1, 143),
        *at_night(
            ("ddp trainer.devices=2", 0, signal.SIGTERM, 143),
            ("ddp_spawn trainer.devices=2", 0, signal.SIGUSR2, 143),
            ("deepspeed_stage_2", 2, signal.SIGUSR2, 143),
        ),
    ],
)
def test_a_signal_to_one_rank_ends_all_in_one_checkpoint(
    strategy: str, ranks: int, number: int, code: int, train: Train, tmp_path: Path, uninterrupted: Finished
) -> None:
    run = (*RUN, *f"strategy={strategy}".split())
    started = tmp_path / "1/runs/plainmodel/mine/metrics.csv"
    stopped = train(*run, SLOWLY, ranks=ranks, check=False, meanwhile=Asks(number, max(0, ranks - 1), started))
    assert stopped.returncode == code, stopped.err
    assert f"stopped    by {signal.Signals(number).name}" in stopped.out
    assert f"go on      {'torchrun' if ranks else 'python'} " in stopped.out
    assert len(list((stopped.run_dir / "checkpoints").glob("step_*.ckpt"))) == 1
    ended = train(*run, FAST, ranks=ranks, folder=stopped.folder)
    for metric in ("train/loss", "val/loss", "samples"):
        expected, found = uninterrupted.column(metric), ended.column(metric)
        assert found == pytest.approx(expected, abs=1e-5), metric


@pytest.mark.parametrize("step", [6, *at_night(7, 8)])
def test_a_run_that_ends_beside_a_validation_validates_once(step: int, train: Train, uninterrupted: Finished) -> None:
    run = (*RUN, FAST, "strategy=single")
    stopped = train(*run, *ASKS, "callbacks.asks.when=on_train_batch_end", f"callbacks.asks.step={step}", check=False)
    assert stopped.returncode == 143, stopped.err
    ended = train(*run, folder=stopped.folder)
    for metric in ("train/loss", "val/loss", "samples"):
        assert ended.column(metric) == uninterrupted.column(metric), metric


@pytest.mark.parametrize("seconds", [1.2, *at_night(0.3)])
def test_before_it_trains_a_run_ends_at_once(seconds: float, train: Train, tmp_path: Path) -> None:
    asks = Asks(signal.SIGTERM, seconds=seconds)

    def ask(processes: list[BaseProcess]) -> None:
        asks(processes)
        (tmp_path / "asked").touch()  # which ends a step that it may have begun by now

    hanging = (HANGING, f"callbacks.pace.until={tmp_path}/asked")
    stopped = train(*RUN, *hanging, "strategy=single", check=False, meanwhile=ask)
    assert stopped.returncode in (143, -signal.SIGTERM)  # the latter before its first line has run
    assert "Traceback" not in stopped.err
    pacing = stopped.folder / "pacing"
    assert not pacing.exists() or pacing.stat().st_mtime <= asks.asked, "it trained after it was asked to end"


def test_an_error_after_a_signal_is_told(train: Train) -> None:
    failing = (FAILING_MODEL, "model.how='is asked to end and raises'", "model.rank=0")
    failed = train(*failing, *RUN[1:-1], "strategy=single", check=False)
    assert failed.returncode == 1
    assert "RuntimeError: this is the bug" in failed.err
    assert "stopped    by" not in failed.out


@pytest.mark.parametrize(
    ("strategy", "ranks", "rank"),
    [
        ("fsdp", 2, 1),
        *at_night(("ddp trainer.devices=2", 0, 0), ("ddp trainer.devices=2", 0, 1)),
        *at_night(("ddp_spawn trainer.devices=2", 0, 1), ("fsdp", 2, 0)),
    ],
)
def test_a_signal_to_one_rank_before_it_trains_ends_all_by_it(
    strategy: str, ranks: int, rank: int, train: Train
) -> None:
    asks = (*ASKS, "callbacks.asks.when=on_fit_start", f"callbacks.asks.rank={rank}")
    stopped = train(*RUN, FAST, *asks, *f"strategy={strategy}".split(), ranks=ranks, check=False)
    assert stopped.returncode == 143, stopped.err
    assert (stopped.out + stopped.err).count("stopped    by SIGTERM") == 1
    assert "Traceback" not in stopped.err


@contextmanager
def in_terminal(folder: Path, *run: str, strategy: str = "single") -> Iterator[tuple[FileIO, subprocess.Popen[bytes]]]:
    """A run in a terminal of its own, in its first batch, and the end of that terminal at which a user sits."""
    controller, terminal = pty.openpty()
    words = (*RUN, *run, f"strategy={strategy}", "trainer.num_sanity_val_steps=0")
    command = ("setsid", "--ctty", "python", TRAIN_PY, *words)
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'src'}"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with subprocess.Popen(command, cwd=folder, env=environment, **streams) as it, open(controller, "r+b", 0) as user:
        os.close(terminal)
        try:
            shown_by(controller, lambda _: (folder / "pacing").exists())
            yield user, it
        finally:
            it.kill()


def test_ctrl_c_in_a_terminal_is_answered_before_the_step_ends_and_twice_does_not_wait_for_it(tmp_path: Path) -> None:
    with in_terminal(tmp_path, HANGING) as (user, it):
        for answer in ("stopping   at the end of this step; Ctrl+C again stops at once", "stopped    by SIGINT"):
            os.write(user.fileno(), b"\x03")
            assert answer in shown_by(user.fileno(), lambda text, answer=answer: answer in text)
        assert it.wait(300) == 130


@pytest.mark.nightly
def test_ctrl_c_in_a_terminal_ends_spawned_ranks_in_one_checkpoint(tmp_path: Path) -> None:
    """Each rank gets SIGINT from the terminal, and SIGTERM from the process that has spawned it."""
    with in_terminal(tmp_path, SLOWLY, "trainer.devices=2", strategy="ddp_spawn") as (user, it):
        os.write(user.fileno(), b"\x03")
        shown = shown_by(user.fileno(), lambda text: "go on  " in text)
        assert it.wait(300) == 130
        assert _are_gone(it.pid, within_seconds=60)
    assert shown.count("stopping   at the end of this step") == shown.count("stopped    by SIGINT") == 1
    assert len(list((tmp_path / "runs/plainmodel/mine/checkpoints").glob("step_*.ckpt"))) == 1


@pytest.mark.nightly
def test_a_run_whose_terminal_is_closed_saves_and_ends(tmp_path: Path) -> None:
    with in_terminal(tmp_path, SLOWLY, "trainer.max_steps=1000") as (user, it):
        user.close()
        assert it.wait(300) == 143
    run = tmp_path / "runs/plainmodel/mine"
    assert len(list((run / "checkpoints").glob("step_*.ckpt"))) == 1
    assert "stopped    by SIGHUP" in (run / "train.log").read_text()


@pytest.mark.parametrize("strategy", ["ddp", *at_night("ddp_spawn")])
def test_ranks_that_a_run_started_end_when_it_is_killed(strategy: str, train: Train, tmp_path: Path) -> None:
    asks = Asks(signal.SIGKILL, file=tmp_path / "1/runs/plainmodel/mine/metrics.csv")
    background = "callbacks.background._target_=tests.engine.failures.pace.InBackground"
    group = 0

    def kill_parent(processes: list[BaseProcess]) -> None:
        nonlocal group
        group = processes[0].pid or 0
        asks(processes)

    run = (*RUN, SLOWLY, background, "trainer.max_steps=1000", f"strategy={strategy}", "trainer.devices=2")
    killed = train(*run, check=False, meanwhile=kill_parent)
    assert killed.returncode == -signal.SIGKILL
    assert _are_gone(group, within_seconds=300)


def _are_gone(group: int, within_seconds: float) -> bool:
    deadline = time.monotonic() + within_seconds
    try:
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return True
    return False
