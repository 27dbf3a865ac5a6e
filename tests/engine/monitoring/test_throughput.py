from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightswitch.monitoring.metrics import MetricsFile
from lightswitch.monitoring.throughput import Meter, Throughput, peak_bytes
from tests.engine.monitoring.clock import Clock
from tests.engine.monitoring.test_metrics import column, columns
from tests.engine.monitoring.test_progress import Slow
from tests.engine.monitoring.tiny import BATCH, Engine, Regression, loader, trainer


def speeds(directory: Path, *callbacks: Callback, tokens: int | None = None, **options: object) -> list[float]:
    """Seconds a step, as logged."""
    throughput = Throughput(samples_per_step=BATCH, tokens_per_sample=tokens)
    run = trainer(directory, logger=MetricsFile(directory), callbacks=[throughput, Engine(), *callbacks], **options)
    run.fit(Regression(), loader(), loader(16))
    return [float(value) for value in column(directory, "throughput/step_seconds") if value]


class SlowSave(Callback):
    """A checkpoint after each step, which takes five times as long as the step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "last.ckpt")
        self._clock.sleep(0.1)


@pytest.mark.parametrize(
    ("beside", "options", "step_seconds"),
    [
        ("nothing", {}, 0.02),
        ("validation", {"val_check_interval": 5}, 0.02),
        ("checkpoints", {}, 0.02),
        ("a second micro batch", {"accumulate_grad_batches": 2}, 0.04),
    ],
)
def test_a_step_takes_the_time_of_its_micro_batches_alone(
    beside: str, options: dict[str, Any], step_seconds: float, tmp_path: Path, clock: Clock
) -> None:
    callbacks = [
        Slow(0.02, validation_seconds=0.2, clock=clock),
        *([SlowSave(clock)] if beside == "checkpoints" else []),
    ]
    steps = speeds(tmp_path, *callbacks, **options)
    assert steps
    assert steps == pytest.approx([step_seconds] * len(steps))


def test_samples_and_tokens_follow_from_the_step(tmp_path: Path) -> None:
    step_seconds = speeds(tmp_path, tokens=64)
    samples = [float(value) for value in column(tmp_path, "throughput/samples_per_second")]
    tokens = [float(value) for value in column(tmp_path, "throughput/tokens_per_second")]
    assert samples == pytest.approx([BATCH / seconds for seconds in step_seconds])
    assert tokens == pytest.approx([64 * speed for speed in samples])


def test_samples_that_are_no_sequences_have_no_tokens(tmp_path: Path) -> None:
    speeds(tmp_path)
    assert "throughput/tokens_per_second" not in columns(tmp_path)


def test_peak_memory_grows_by_what_is_allocated() -> None:
    before = peak_bytes(torch.device("cpu"))
    held = torch.ones(before // 4 + 2**26)  # as many bytes as the process had, and 256 MiB
    assert peak_bytes(torch.device("cpu")) >= before + 2**26
    del held


def test_the_first_steps_do_not_count(clock: Clock) -> None:
    meter = Meter()
    meter.start(100)
    for step in range(101, 101 + Meter.WARMUP_STEPS):
        clock.sleep(0.5)
        meter.update(step)
    assert meter.read(step) is None
    clock.sleep(0.01)
    assert meter.read(step + 1) == pytest.approx(100)


def test_time_left_includes_validations_to_come(clock: Clock) -> None:
    meter = Meter()
    meter.update(Meter.WARMUP_STEPS)
    clock.sleep(0.05)
    meter.pause()
    clock.sleep(0.05)
    meter.resume()
    assert meter.read(Meter.WARMUP_STEPS + 5) == pytest.approx(100)
    assert meter.seconds_for(5) == pytest.approx(0.1)
