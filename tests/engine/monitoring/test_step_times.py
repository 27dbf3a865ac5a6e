"""Where the time of a step goes: the arithmetic by hand, and steps whose phases take a known time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.utils.data import DataLoader, Dataset

from lightswitch.monitoring import step_times
from lightswitch.monitoring.step_timer import StepTimer, _split
from lightswitch.monitoring.step_times import PHASES, StepTimes, covered, read, split
from tests.engine.conftest import Train
from tests.engine.monitoring.tiny import Regression, loader, trainer
from tests.engine.tiny import LANGUAGE
from tests.night import at_night

MARKS = [(0.0, "forward"), (2.0, "backward"), (6.0, "optimizer"), (7.0, "data"), (8.0, "end")]


INTERRUPTED = [(0.0, "forward"), (1.0, "data"), (2.0, "validation"), (5.0, "data"), (5.5, "saving"), (9.0, "forward")]
SPLITS = {  # marks, collectives and computations, from and to so many seconds; the seconds of phases, and those beside
    "a collective counts where nothing is computed beside it": (
        (MARKS, [(3.0, 5.5)], [(0.0, 2.0), (2.0, 4.5), (6.0, 7.0)]),
        {"forward": 2.0, "backward": 3.0, "communication": 1.0, "optimizer": 1.0, "data": 1.0},
        1.5,
    ),
    "a collective is cut where a phase ends, and two at once count once": (
        (MARKS, [(5.0, 6.5), (5.2, 6.0)], [(2.0, 5.0)]),
        {"forward": 2.0, "backward": 3.0, "communication": 1.5, "optimizer": 0.5, "data": 1.0},
        0.0,
    ),
    "what is no phase is left out": (
        ([*INTERRUPTED, (9.5, "end")], [(3.0, 4.0)], []),
        {"forward": 1.5, "data": 1.5},
        0.0,
    ),
}


@pytest.mark.parametrize("case", SPLITS)
def test_the_time_of_a_step_is_split_into_phases(case: str) -> None:
    events, seconds, beside = SPLITS[case]
    assert split(*events) == (dict.fromkeys(PHASES, 0.0) | seconds, beside)
    assert covered([(4.0, 5.0), (0.0, 1.0), (1.0, 2.0), (1.5, 1.8)], 0.5, 4.5) == 2.0


def _event(name: str, start: float, end: float, on_gpu: bool = False, is_annotation: bool = False) -> FunctionEvent:
    """An event of torch's profiler, from and to so many microseconds."""
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return FunctionEvent(0, name, 1, start, end, device_type=device, is_user_annotation=is_annotation)


def test_on_gpus_kernels_count_and_not_the_calls_that_launch_them() -> None:
    """The backward pass lasts 100 µs. Kernels of a product run from 10 to 60, NCCL's from 40 to 90: 30 µs are alone."""
    events = [
        *(_event("lightswitch: backward", 0, 1, is_annotation=True), _event("lightswitch: end", 100, 101)),
        _event("lightswitch: end", 50, 60, on_gpu=True, is_annotation=True),  # annotations are repeated there
        *(_event("aten::mm", 0, 100), _event("c10d::allreduce_", 5, 10)),
        _event("nccl:all_reduce", 0, 100, on_gpu=True, is_annotation=True),
        _event("sm90_xmma_gemm_f32f32", 10, 60, on_gpu=True),
        _event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 90, on_gpu=True),
    ]
    seconds, overlapped = _split(events, on_gpu=True)
    assert (seconds["backward"], seconds["communication"]) == pytest.approx((70e-6, 30e-6))
    assert overlapped == pytest.approx(20e-6)


def test_on_cpus_calls_that_only_start_or_wait_for_a_collective_compute_nothing() -> None:
    """Of gloo's 50 µs, 20 to 70, the product covers 10 µs; FSDP's own region waits through all of it."""
    events = [
        *(_event("lightswitch: forward", 0, 1), _event("lightswitch: end", 100, 101)),
        *(_event("aten::mm", 0, 30), _event("gloo:all_gather", 20, 70), _event("c10d::_allgather_base_", 15, 70)),
        *(_event("FSDP::all_gather (1)", 10, 80), _event("autograd::engine::evaluate_function: X", 0, 100)),
    ]
    seconds, overlapped = _split(events, on_gpu=False)
    assert (seconds["forward"], seconds["communication"]) == pytest.approx((60e-6, 40e-6))
    assert overlapped == pytest.approx(10e-6)


# Training whose phases take a known time, because they sleep

DATA, FORWARD, BACKWARD, OPTIMIZER, REST, SAVE = 0.010, 0.020, 0.030, 0.015, 0.005, 0.1  # seconds


class PacedBatches(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(DATA)
        return torch.ones(4), torch.ones(1)


class Paced(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(FORWARD)
        return super().training_step(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        time.sleep(BACKWARD)
        super().backward(loss, *args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: time.sleep(OPTIMIZER))
        return optimizer


class Reporting(pl.Callback):
    """Takes its time after each step, as callbacks do that log."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(REST)


class Saving(pl.Callback):
    """Saves between two steps, before other hooks of the next one, as the engine does."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/fourth.ckpt")


class SlowToSave(pl.Callback):
    def on_save_checkpoint(self, *_: Any) -> None:
        time.sleep(SAVE)


class Late(pl.Callback):
    """Rank 1 ends its forward phase late, and the others wait for it in a collective."""

    SECONDS = 0.2

    def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(self.SECONDS)


SLACK = 0.1  # seconds; a loaded machine sleeps longer, and what is not in its phase is missing there


def _measured(measure: Callable[[], StepTimes], is_undisturbed: Callable[[StepTimes], bool]) -> StepTimes:
    """What is measured; again, up to five times, where something else took time that the phases are not to take."""
    for _ in range(4):
        if is_undisturbed(found := measure()):
            return found
    return measure()


def test_each_phase_takes_the_time_that_it_takes(tmp_path: Path) -> None:
    """A save falls into the measured steps, and counts for none of them."""
    expected = {"data": DATA, "forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER, "rest": REST}

    def measure() -> StepTimes:
        callbacks = [Reporting(), Saving(), StepTimer(str(tmp_path), skip_steps=2, steps=4), SlowToSave()]
        run = trainer(tmp_path, callbacks=callbacks, max_steps=12, limit_val_batches=0)
        run.fit(Paced(), DataLoader(PacedBatches(), batch_size=1), loader(8))
        found = read(tmp_path)
        assert found is not None
        return found

    def is_undisturbed(found: StepTimes) -> bool:
        is_within = all(found.seconds[phase] < seconds + SLACK for phase, seconds in expected.items())
        return is_within and 12 * found.saving_seconds < SAVE + 10 * SLACK

    found = _measured(measure, is_undisturbed)
    for phase, seconds in expected.items():
        assert seconds <= found.seconds[phase] < seconds + SLACK, phase
    assert found.seconds["communication"] == 0
    assert (found.measured_steps, found.trained_steps, found.world_size) == (4, 12, 1)
    assert SAVE <= 12 * found.saving_seconds < SAVE + 10 * SLACK
    assert 0 < found.startup_seconds < time.time() - psutil.Process().create_time()
    assert found.peak_bytes > 2**26  # what a process takes that has imported torch


def _timed(folder: Path, skip_steps: int, steps: int = 5) -> StepTimes:
    """What is found of a run of 20 steps."""
    trainer(folder, callbacks=[StepTimer(str(folder), skip_steps, steps)]).fit(Regression(), loader(), loader(8))
    found = read(folder)
    assert found is not None
    return found


def test_a_run_that_ends_too_early_has_no_phases_and_leaves_what_an_earlier_start_has_measured(tmp_path: Path) -> None:
    found = _timed(tmp_path, skip_steps=50)
    assert (found.seconds, found.measured_steps, found.trained_steps) == ({}, 0, 20)
    assert [_timed(tmp_path, skip_steps).measured_steps for skip_steps in (17, 50)] == [3, 3]


def test_it_is_off_beside_another_profiler_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timer, theirs = StepTimer(str(tmp_path), 0, 1), PyTorchProfiler(dirpath=tmp_path, schedule=None)
    run = trainer(tmp_path, callbacks=[timer])
    run.profiler = theirs  # which is not started: Lightning's fails for a run as short as this one
    with caplog.at_level(logging.WARNING):
        timer.on_train_start(run, Regression())
        timer.on_train_batch_start(run, Regression(), None, 0)
    assert timer._profile is None
    assert "steps are not measured: a process can have only one torch profiler, and trainer" in caplog.text


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    (tmp_path / step_times.FILE).write_text('{"startup_seconds": 1')
    assert read(tmp_path) is None
    (tmp_path / step_times.FILE).write_text('{"other": 1}')
    assert read(tmp_path) is None


LATE = (*LANGUAGE, "trainer.max_steps=8", "trainer.val_check_interval=8", "micro_batch_size=12")
LATE += ("trainer.accelerator=cpu", "callbacks=[default,step_times]")
LATE += ("callbacks.step_times.skip_steps=3", "callbacks.step_times.steps=4")


@pytest.mark.parametrize("strategy", ["fsdp", *at_night("ddp", "deepspeed_stage_2")])
def test_a_rank_that_waits_for_another_communicates(strategy: str, train: Train) -> None:
    """Rank 1 sleeps at the end of each forward phase; rank 0 waits as long, wherever it is that the strategy first
    needs rank 1. The mean over both ranks is half of it in each."""
    late = "callbacks.late._target_=tests.engine.monitoring.test_step_times.Late"

    def measure() -> StepTimes:
        found = read(train(*LATE, late, f"strategy={strategy}", ranks=2).run_dir)
        assert found is not None
        return found

    def others(found: StepTimes) -> float:
        return sum(found.seconds[phase] for phase in ("data", "optimizer", "rest"))

    def waits(found: StepTimes) -> bool:
        return found.seconds["communication"] + 0.005 >= Late.SECONDS / 2

    # rank 0 waits for less where it comes late itself
    found = _measured(measure, lambda found: waits(found) and others(found) < Late.SECONDS / 2)
    assert (found.world_size, found.measured_steps) == (2, 4)
    assert found.seconds["forward"] >= Late.SECONDS / 2
    assert waits(found)
    assert others(found) < Late.SECONDS / 2


@pytest.mark.nightly
def test_buckets_that_are_averaged_while_the_backward_pass_goes_on_overlap_it(train: Train) -> None:
    run = train(*LATE, "strategy=ddp", "trainer.strategy.bucket_cap_mb=0.01", ranks=2)
    found = read(run.run_dir)
    assert found is not None
    assert found.overlapped_seconds > 0
