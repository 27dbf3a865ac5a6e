"""Speed, memory and the norm of gradients, as they are logged."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision

from lightswitch.monitoring.metrics import MetricsFile
from lightswitch.monitoring.throughput import GradNorm, Meter, Throughput, gradient_norm, peak_bytes
from tests.engine.fits import LANGUAGE, Fits
from tests.engine.monitoring.conftest import Clock
from tests.engine.monitoring.test_metrics import column
from tests.engine.monitoring.test_progress import Slow
from tests.engine.monitoring.tiny import BATCH, Engine, Regression, loader, trainer
from tests.runs import largest_difference


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
        Slow(0.02, evaluation_seconds=0.2, clock=clock),
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
        meter.read(step)
    assert meter.steps_per_second is None
    clock.sleep(0.01)
    assert meter.read(step + 1) == pytest.approx(100)


def test_time_left_includes_validations_to_come(clock: Clock) -> None:
    meter = Meter()
    meter.read(Meter.WARMUP_STEPS)
    clock.sleep(0.05)
    meter.pause()
    clock.sleep(0.05)
    meter.resume()
    assert meter.read(Meter.WARMUP_STEPS + 5) == pytest.approx(100)
    assert meter.seconds_for(5) == pytest.approx(0.1)


class GradientsByHand(Callback):
    """Computes each step's norm from the numbers, at float64."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        values = [g for p in pl_module.parameters() if p.grad is not None for g in p.grad.flatten().tolist()]
        self.norms.append(math.sqrt(sum(value**2 for value in values)))


def logged_norms(directory: Path, model: LightningModule | None = None, **options: Any) -> list[float]:
    callbacks = [GradNorm(), *options.pop("callbacks", [])]
    run = trainer(directory, logger=MetricsFile(directory), callbacks=callbacks, **options)
    run.fit(model or Regression(), loader(), loader(16))
    return [float(value) for value in column(directory, "grad_norm")]


def test_it_is_the_norm_of_all_gradients_before_clipping(tmp_path: Path) -> None:
    by_hand = GradientsByHand()
    norms = logged_norms(tmp_path, callbacks=[by_hand], gradient_clip_val=1e-3)
    assert norms == pytest.approx(by_hand.norms[4::5], rel=1e-5)
    assert min(norms) > 1e-3
    assert column(tmp_path, "step") == ["4", "9", "14", "19"]  # those that are logged
    assert gradient_norm([torch.nn.Parameter(torch.ones(2))]).item() == 0


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_free_of_the_loss_scale_of_16_mixed(tmp_path: Path, fused: bool) -> None:
    expected = logged_norms(tmp_path / "32", log_every_n_steps=1, max_steps=3)
    # Lightning turns the string "16-mixed" into "bf16-mixed" on a CPU, but takes the plugin.
    half = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    norms = logged_norms(tmp_path / "16", Regression(fused=fused), log_every_n_steps=1, max_steps=3, plugins=[half])
    assert norms == pytest.approx(expected, rel=0.05)


def test_two_ranks_log_the_norm_of_one(fits: Fits) -> None:
    """Sharded ones: strategies/test_fsdp.py."""
    assert largest_difference(fits(replace(LANGUAGE, strategy="ddp"), 2)[0], fits(LANGUAGE)[0], "grad_norm") <= 1e-4
