"""Where the time of a step goes: the arithmetic by hand, and steps whose phases take a known time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from lightning.pytorch.profilers import PyTorchProfiler
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.utils.data import DataLoader

from lightswitch.monitoring import step_times
from lightswitch.monitoring.step_timer import StepTimer, _split
from lightswitch.monitoring.step_times import PHASES, StepTimes, merged, read, split
from tests.engine.conftest import Train
from tests.engine.monitoring import paced
from tests.engine.monitoring.paced import Late, Paced, PacedBatches, Reporting, Saving
from tests.engine.monitoring.tiny import Regression, loader, trainer
from tests.engine.tiny import LANGUAGE
from tests.night import at_night

MARKS = [(0.0, "forward"), (2.0, "backward"), (6.0, "optimizer"), (7.0, "data"), (8.0, "end")]


def test_intervals_that_overlap_or_touch_become_one() -> None:
    assert merged([(4.0, 5.0), (0.0, 1.0), (1.0, 2.0), (1.5, 1.8)]) == [(0.0, 2.0), (4.0, 5.0)]


def test_communication_counts_where_nothing_is_computed_beside_it() -> None:
    """The backward pass, 2 to 6, computes until 4.5; a collective lasts from 3 to 5.5: 1.5 s beside it, 1 s alone."""
    seconds, overlapped = split(MARKS, [(3.0, 5.5)], [(0.0, 2.0), (2.0, 4.5), (6.0, 7.0)])
    assert seconds == dict.fromkeys(PHASES, 0.0) | {
        **{"forward": 2.0, "backward": 3.0, "communication": 1.0, "optimizer": 1.0, "data": 1.0}
    }
    assert overlapped == {"backward": 1.5}


def test_a_collective_is_cut_where_a_phase_ends_and_two_at_once_count_once() -> None:
    """From 5 to 6.5, alone in the backward pass and for half a second of the optimizer, which computes nothing."""
    seconds, overlapped = split(MARKS, [(5.0, 6.5), (5.2, 6.0)], [(2.0, 5.0)])
    assert (seconds["backward"], seconds["communication"], seconds["optimizer"]) == (3.0, 1.5, 0.5)
    assert overlapped == {}
    assert sum(seconds.values()) == 8.0


def test_what_is_no_phase_is_left_out() -> None:
    marks = [
        (0.0, "forward"),
        (1.0, "data"),
        (2.0, "validation"),
        (5.0, "data"),
        (5.5, "saving"),
        (9.0, "forward"),
        (9.5, "end"),
    ]
    seconds, _ = split(marks, [(3.0, 4.0)], [])
    assert seconds == dict.fromkeys(PHASES, 0.0) | {"forward": 1.5, "data": 1.5}


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
    assert overlapped == {"backward": pytest.approx(20e-6)}


def test_on_cpus_calls_that_only_start_or_wait_for_a_collective_compute_nothing() -> None:
    """Of gloo's 50 µs, 20 to 70, the product covers 10 µs; FSDP's own region waits through all of it."""
    events = [
        *(_event("lightswitch: forward", 0, 1), _event("lightswitch: end", 100, 101)),
        *(_event("aten::mm", 0, 30), _event("gloo:all_gather", 20, 70), _event("c10d::_allgather_base_", 15, 70)),
        *(_event("FSDP::all_gather (1)", 10, 80), _event("autograd::engine::evaluate_function: X", 0, 100)),
    ]
    seconds, overlapped = _split(events, on_gpu=False)
    assert (seconds["forward"], seconds["communication"]) == pytest.approx((60e-6, 40e-6))
    assert overlapped == {"forward": pytest.approx(10e-6)}


SLACK = 0.1  # seconds; a loaded machine sleeps longer, and what is not in its phase is missing there


def _measured(measure: Callable[[], StepTimes], is_undisturbed: Callable[[StepTimes], bool]) -> StepTimes:
    """What is measured; again, up to five times, where something else took time that the phases are not to take."""
    for _ in range(4):
        if is_undisturbed(found := measure()):
            return found
    return measure()


def _paced(tmp_path: Path, **options: int) -> StepTimes:
    timer = StepTimer(str(tmp_path), skip_steps=2, steps=4)
    run = trainer(tmp_path, callbacks=[Reporting(), timer, Saving()], max_steps=12, limit_val_batches=0, **options)
    run.fit(Paced(), DataLoader(PacedBatches(), batch_size=1), loader(8))
    found = read(tmp_path)
    assert found is not None
    return found


def _are_within(found: StepTimes, expected: Mapping[str, float]) -> bool:
    return all(found.seconds[phase] < seconds + SLACK for phase, seconds in expected.items())


def test_each_phase_takes_the_time_that_it_takes(tmp_path: Path) -> None:
    """A save falls into the measured steps, and counts for none of them."""
    expected = {"data": paced.DATA, "forward": paced.FORWARD, "backward": paced.BACKWARD, "optimizer": paced.OPTIMIZER}
    expected["rest"] = paced.REST
    found = _measured(
        lambda: _paced(tmp_path),
        lambda found: _are_within(found, expected) and found.saving_seconds < paced.SAVE + 10 * SLACK,
    )
    for phase, seconds in expected.items():
        assert seconds <= found.seconds[phase] < seconds + SLACK, phase
    assert found.seconds["communication"] == 0
    assert (found.measured_steps, found.trained_steps, found.world_size) == (4, 12, 1)
    assert paced.SAVE <= found.saving_seconds < paced.SAVE + 10 * SLACK
    assert found.saving_seconds_a_step == found.saving_seconds / 12
    assert 0 < found.startup_seconds < time.time() - psutil.Process().create_time()
    assert found.peak_bytes > 2**26  # what a process takes that has imported torch


def test_a_step_of_two_micro_batches_has_the_phases_of_both(tmp_path: Path) -> None:
    expected = {"forward": 2 * paced.FORWARD, "backward": 2 * paced.BACKWARD, "optimizer": paced.OPTIMIZER}
    found = _measured(lambda: _paced(tmp_path, accumulate_grad_batches=2), lambda found: _are_within(found, expected))
    assert (found.measured_steps, found.trained_steps) == (4, 12)
    for phase, seconds in expected.items():
        assert seconds <= found.seconds[phase] < seconds + SLACK, phase


def _timed(folder: Path, skip_steps: int, steps: int = 5) -> StepTimes:
    """What is found of a run of 20 steps."""
    trainer(folder, callbacks=[StepTimer(str(folder), skip_steps, steps)]).fit(Regression(), loader(), loader(8))
    found = read(folder)
    assert found is not None
    return found


def test_a_run_that_ends_too_early_has_no_phases_and_leaves_what_an_earlier_start_has_measured(tmp_path: Path) -> None:
    found = _timed(tmp_path, skip_steps=50)
    assert (found.seconds, found.measured_steps, found.trained_steps) == ({}, 0, 20)
    assert [_timed(tmp_path, skip_steps).measured_steps for skip_steps in (5, 50)] == [5, 5]


def test_a_run_that_ends_while_it_is_measured_has_the_steps_until_then(tmp_path: Path) -> None:
    found = _timed(tmp_path, skip_steps=17)
    assert found.measured_steps == 3
    assert found.seconds["forward"] > 0


def test_it_is_off_beside_another_profiler_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timer, theirs = StepTimer(str(tmp_path), 0, 1), PyTorchProfiler(dirpath=tmp_path, schedule=None)
    run = trainer(tmp_path, callbacks=[timer])
    run.profiler = theirs  # which is not started: Lightning's fails for a run as short as this one
    with caplog.at_level(logging.WARNING):
        timer.on_train_start(run, Regression())
        timer.on_train_batch_start(run, Regression(), None, 0)
    assert timer._profile is None
    assert "steps are not measured: a process can have only one torch profiler, and trainer" in caplog.text


def test_a_number_of_steps_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="skip 0 steps or more, and measure at least 1"):
        StepTimer("runs", steps=0)


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
    late = "callbacks.late._target_=tests.engine.monitoring.paced.Late"

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


def test_buckets_that_are_averaged_while_the_backward_pass_goes_on_overlap_it(train: Train) -> None:
    run = train(*LATE, "strategy=ddp", "trainer.strategy.bucket_cap_mb=0.01", ranks=2)
    found = read(run.run_dir)
    assert found is not None
    assert found.overlapped_seconds["backward"] > 0
