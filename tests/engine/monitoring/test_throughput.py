"""Speed, memory and the norm of gradients, as they are logged."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision

from lightswitch.monitoring.metrics import MetricsFile
from lightswitch.monitoring.step_times import PHASES, StepTimes
from lightswitch.monitoring.throughput import GradNorm, Meter, Throughput, gradient_norm, peak_bytes
from tests.engine.conftest import Train
from tests.engine.fits import LANGUAGE, Fits
from tests.engine.monitoring.conftest import Clock
from tests.engine.monitoring.test_metrics import column
from tests.engine.monitoring.test_progress import Slow
from tests.engine.monitoring.tiny import BATCH, Engine, Regression, loader, trainer
from tests.engine.tiny import LANGUAGE_MODEL, TEXT
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
        Slow(clock, 0.02, evaluation_seconds=0.2),
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


class Paced(Regression):
    """Whose phases take a known time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        self.clock.sleep(0.02)
        return super().training_step(batch)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.clock.sleep(0.03)
        super().backward(loss, *args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.clock.sleep(0.015))
        return optimizer


class Reporting(Callback):
    """Saves before a step, as the engine does, and takes its time after each batch."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "last.ckpt")
        self._clock.sleep(0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self._clock.sleep(0.005)


class PacedBatches(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._clock.sleep(0.01)
        return torch.ones(1, 4), torch.ones(1, 1)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_times_of_a_steps_phases_are_logged(micro_batches: int, tmp_path: Path, clock: Clock) -> None:
    """Without validations and saves. What hooks do after a batch that ends no step is of its passes."""
    run = trainer(
        tmp_path,
        logger=MetricsFile(tmp_path),
        callbacks=[Reporting(clock), Slow(clock, 0, evaluation_seconds=0.2), StepTimes()],
        accumulate_grad_batches=micro_batches,
        max_steps=10,
        val_check_interval=5 * micro_batches,
    )
    run.fit(Paced(clock), torch.utils.data.DataLoader(PacedBatches(clock), batch_size=None), loader(16))
    found = {phase: [float(value) for value in column(tmp_path, f"time/{phase}") if value] for phase in PHASES}
    passes = 0.05 if micro_batches == 1 else 0.05 + 0.005 + 0.05
    expected = {"data": 0.01 * micro_batches, "forward_backward": passes, "optimizer": 0.015, "rest": 0.005}
    assert found == {phase: pytest.approx([seconds] * 2) for phase, seconds in expected.items()}


SHORT = (*LANGUAGE_MODEL, TEXT, "trainer.accelerator=cpu", "trainer.log_every_n_steps=1")
SHORT += ("trainer.val_check_interval=6", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1")


def test_a_run_shows_a_trace_its_utilization_and_what_the_model_was_worth_at_first(train: Train) -> None:
    words = (*SHORT, "trainer.max_steps=6", "plan.device=h100", "strategy=single")
    shown = ("callbacks=[default,trace,validate_at_start]", "callbacks.trace.skip_steps=2", "callbacks.trace.steps=2")
    plain, run = train(*words), train(*words, *shown)
    assert run.column("train/loss") == plain.column("train/loss")
    first, last = run.column("val/loss")[0], run.column("val/loss")[5]
    assert last < first
    assert plain.column("val/loss") == {5: last}
    trace = json.loads(gzip.decompress((run.run_dir / "trace/rank_0.json.gz").read_bytes()))
    assert {"aten::addmm", "aten::mm"} & {event["name"] for event in trace["traceEvents"]}
    utilization = run.column("throughput/mfu")
    seconds = run.column("throughput/step_seconds")
    # the peak of an H100 in 32 bits: 67e12 operations a second
    tflop = [share * seconds[step] * 67 for step, share in utilization.items()]
    assert tflop == pytest.approx([tflop[0]] * len(tflop))
    # of the head alone: 6 × 256 × 32 for each of 64 × 32 bytes; with the blocks less than ten times that
    assert 1e-4 < tflop[0] < 1e-3


def test_a_snapshot_of_memory_is_refused_on_a_cpu(train: Train) -> None:
    refused = train(*SHORT, "trainer.max_steps=1", "callbacks=[default,memory_snapshot]", check=False)
    assert refused.refusal.startswith("memory_snapshot reads the allocator of CUDA, and this run is on a CPU")
