"""Two starts of one run id: one trains, and the other is told who does."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.process
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from lightswitch.runs import lock
from tests.engine.conftest import CHECKOUT, PLAIN, Train, runs_in
from tests.engine.failures.pace import PACE_TARGET
from tests.engine.processes import Start, said
from tests.night import at_night

RUN = (*PLAIN, "run_id=mine", "trainer.accelerator=cpu", "logger=csv", "~callbacks.lr_monitor", "trainer.max_steps=6")
PACE = (PACE_TARGET, "callbacks.pace.seconds=1")
WAITS = (PACE_TARGET, "callbacks.pace.seconds=600", "callbacks.pace.until=go_on")

Processes = list[multiprocessing.process.BaseProcess]


@pytest.mark.parametrize("ranks", [0, *at_night(2)])
def test_of_two_starts_at_once_exactly_one_trains(ranks: int, train: Train, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    starts, folder = (train, runs_in(tmp_path / "other")), tmp_path / "runs_here"
    run = (*RUN, *WAITS, *(["strategy=ddp"] if ranks else []))
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(start, *run, ranks=ranks, folder=folder, check=False) for start in starts]
        wait(both, return_when=FIRST_COMPLETED)
        (folder / "go_on").touch()  # the one that trains waits until the other has ended
    trained, refused = sorted((start.result() for start in both), key=lambda start: start.returncode)
    assert (trained.returncode, refused.returncode) == (0, 2), trained.err + refused.err
    assert re.fullmatch(
        r"error: runs/plainmodel/mine is being written by process \d+ on \S+, since [\d-]+ [\d:]+; "
        "wait until it has ended, or give this run another run_id\n",
        refused.err,
    )
    assert [row["step"] for row in trained.metrics() if row.get("val/loss") or row.get("test/loss")] == ["5", "6"]
    assert not (trained.run_dir / lock.FILE).exists()


@pytest.mark.parametrize("signals", [[signal.SIGKILL], *at_night(([signal.SIGINT] * 2,))], ids=str)
def test_a_run_that_was_ended_can_be_started_again(signals: list[signal.Signals], train: Train, tmp_path: Path) -> None:
    def end_it(processes: Processes) -> None:
        _until((tmp_path / "1/runs/plainmodel/mine/metrics.csv").exists)
        for number in signals:
            with contextlib.suppress(ProcessLookupError):  # the first signal may have ended it by now
                os.kill(processes[0].pid or 0, number)
            time.sleep(0.1)

    run = (*RUN, "trainer.log_every_n_steps=1", "trainer.max_steps=100")
    ended = train(*run, *PACE, meanwhile=end_it, check=False)
    assert ended.returncode != 0
    assert (ended.run_dir / lock.FILE).exists() == (signals == [signal.SIGKILL])
    train(*run, folder=ended.folder)
    assert not (ended.run_dir / lock.FILE).exists()


def test_beside_a_run_a_finished_start_says_so_and_an_evaluation_leaves_its_record(train: Train) -> None:
    first = train(*RUN)
    run_dir = first.run_dir
    names = ("config.yaml", "run.json", ".hydra/config.yaml", ".hydra/overrides.yaml", "ended.json")
    record = {name: (run_dir / name).read_text() for name in names}
    results = json.loads((run_dir / "results.json").read_text())
    held = lock.take(run_dir, on_lost=print)
    assert "finished   fit and test have ended at step 6" in train(*RUN, folder=first.folder).out
    last = "ckpt_path=runs/plainmodel/mine/checkpoints/last.ckpt"
    train(*PLAIN, "mode=test", last, folder=first.folder)
    held.release()
    (own,) = (path for path in first.folder.glob("runs/plainmodel/*") if path.name != "mine")
    assert "test/loss" in (own / "metrics.csv").read_text()
    train(*RUN, "mode=validate", "ckpt_path=last", "data.batch_size=5", folder=first.folder)  # with the run's own id
    assert {name: (run_dir / name).read_text() for name in names} == record
    assert json.loads((run_dir / "results.json").read_text()).keys() >= results.keys()
    assert "finished   fit and test have ended at step 6" in train(*RUN, folder=first.folder).out


@pytest.mark.nightly
def test_a_sweep_has_one_walker(start: Start, tmp_path: Path) -> None:
    for path in ("conf", "tests/engine/sweeps/swept.py"):
        (tmp_path / Path(path).name).symlink_to(CHECKOUT / path)
    command = ("python", "swept.py", "-m", "name=waiting", "seed=1,2", "run_id=x")
    first = start(*command)
    _until(lambda: (tmp_path / "runs/waiting/x/0/waits").exists())
    second = start(*command)
    out = said(second)
    assert (second.returncode, out.count("\n")) == (2, 1), out
    assert out.startswith(f"error: runs/waiting/x is being written by process {first.pid} on ")
    first.send_signal(signal.SIGTERM)
    first.wait()
    assert not list(tmp_path.glob(f"runs/waiting/x/{lock.FILE}"))


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
