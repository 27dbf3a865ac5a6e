"""The habits of Lightning's users: what they have in their modules and fingers, and what comes of it here, a row each.

Rows share runs, which are by far dearer than looking at them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.engine.conftest import PLAIN_DATA, Finished

Look = Callable[[Finished], Any]


class Typed(NamedTuple):
    """A run: its model, what is typed beside it, its exit code, and the run in whose folder it starts.

    Five steps are an epoch.
    """

    model: str
    typed: str = ""
    code: int = 0
    after: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        named = (f"model._target_={self.model}", PLAIN_DATA, "logger=csv", "global_batch_size=40")
        return (*named, "trainer.log_every_n_steps=1", *self.typed.split())

    @property
    def run_id(self) -> str:
        """As a pattern of names."""
        return self.typed.partition("run_id=")[2].partition(" ")[0] or "*"


class Habit(NamedTuple):
    """What a user has or types, in which run, a text of its output, and what is found when one looks."""

    has: str
    run: str
    told: str = ""
    look: Look = lambda run: None
    found: Any = None


_PLAIN = "tests.engine.plain"
_BORING = "lightning.pytorch.demos.boring_classes"
_ON_TWO = "trainer.strategy=ddp trainer.devices=2"
_MONITOR = "callbacks.best_checkpoint.monitor"
_BY_STEPS = "trainer.val_check_interval=4"
_STOP = (
    "model.accuracy=val_acc callbacks=[checkpoint,early_stopping] callbacks.early_stopping.min_delta=10 "
    "callbacks.early_stopping.patience=3 run_id=mine"
)
_SAVED = "callbacks.last_checkpoint.every_n_steps=2 trainer.val_check_interval=2"
_EMPTY = f"data._target_={_PLAIN}.EmptyData"

NAMED, BY_HAND, PLAIN = f"{_PLAIN}.NamedModel", f"{_PLAIN}.ManualModel", f"{_PLAIN}.PlainModel"
GAN, NORMED, PLATEAU = f"{_PLAIN}.GanModel", f"{_PLAIN}.NormedModel", f"{_PLAIN}.PlateauModel"

RUNS: dict[str, Typed] = {
    "epochs": Typed(NAMED, "model.loss=val_loss data.batch_size=20 trainer.max_epochs=4"),
    "epochs and steps": Typed(PLAIN, f"trainer.max_epochs=2 trainer.max_steps=7 model.dropout=0.1 {_ON_TWO}"),
    "epochs, validated by steps": Typed(
        NORMED, f"micro_batch_size=20 trainer.max_epochs=2 {_BY_STEPS} trainer.check_val_every_n_epoch=null"
    ),
    "steps, validated by epochs": Typed(
        NAMED, "model.accuracy=val_acc trainer.max_steps=10 trainer.check_val_every_n_epoch=1"
    ),
    "steps": Typed(
        NAMED, f"model.loss=val_loss model.accuracy=val_acc {_MONITOR}=val_acc trainer.max_steps=10 {_BY_STEPS}"
    ),
    "time": Typed(NORMED, "trainer.max_time=00:00:00:02 callbacks.last_checkpoint.every_n_steps=1000"),
    "validations too rare": Typed(PLAIN, "trainer.max_epochs=2 trainer.val_check_interval=100", code=2),
    "another name": Typed(NAMED, "model.loss=validation_loss model.accuracy=val_acc trainer.max_epochs=2"),
    "no metric": Typed(NAMED, "trainer.max_epochs=2"),
    "no loss": Typed(NAMED, "model.accuracy=val_acc model.loss=val_nll model.trained=d_loss trainer.max_epochs=2"),
    "misspelt": Typed(NAMED, f"model.loss=val_loss {_MONITOR}=val_los trainer.max_epochs=2", code=2),
    "nan": Typed(NAMED, "model.loss=val_loss model.nan_from_step=10 trainer.max_epochs=4"),
    "nan at once": Typed(NAMED, "model.loss=val_loss model.nan_from_step=0 trainer.max_epochs=2"),
    "stops early": Typed(NAMED, f"{_STOP} trainer.max_epochs=2"),
    "stops early, resumed": Typed(NAMED, f"{_STOP} trainer.max_epochs=20", after="stops early"),
    "by hand": Typed(BY_HAND, "trainer.max_epochs=2 callbacks.last_checkpoint.every_n_steps=4"),
    "by hand to a step": Typed(BY_HAND, "trainer.max_steps=12 run_id=mine"),
    "by hand, resumed": Typed(BY_HAND, "trainer.max_steps=20 run_id=mine", after="by hand to a step"),
    "by hand, nan": Typed(f"{_PLAIN}.ManualNanModel", "model.step=6 on_nan=skip trainer.max_epochs=2"),
    "by hand, clipped": Typed(BY_HAND, "trainer.gradient_clip_val=0.5", code=2),
    "by hand, micro batches": Typed(BY_HAND, "micro_batch_size=20", code=2),
    "several optimizers": Typed(f"{_PLAIN}.AutomaticGanModel", code=2),
    "gan": Typed(GAN, f"{_ON_TWO} trainer.max_steps=4"),
    "plateau": Typed(PLATEAU, "trainer.max_steps=20"),
    "plateau, cut": Typed(PLATEAU, f"trainer.max_steps=20 micro_batch_size=10 {_ON_TWO}"),
    "no module": Typed("torch.nn.ReLU", f"data._target_={_PLAIN}.Points data.samples=8", code=2),
    "empty": Typed(PLAIN, f"{_EMPTY} data.shuffle=true", code=2),
    "empty, in order": Typed(PLAIN, f"{_EMPTY} data.shuffle=false", code=2),
    "saved": Typed(PLAIN, f"{_SAVED} run_id=mine trainer.max_steps=4"),
    "last": Typed(PLAIN, f"{_SAVED} run_id=mine trainer.max_steps=6 ckpt_path=last", after="saved"),
    "path": Typed(
        PLAIN,
        f"{_SAVED} run_id=other trainer.max_steps=6 ckpt_path=runs/plainmodel/mine/checkpoints/step_4.ckpt",
        after="last",
    ),
    "best": Typed(PLAIN, "run_id=mine mode=test ckpt_path=best", after="path"),
    "untested": Typed(f"{_PLAIN}.UntestedModel", "run_id=mine trainer.max_steps=2 trainer.val_check_interval=2"),
    "untested, tested": Typed(f"{_PLAIN}.UntestedModel", "mode=test ckpt_path=last run_id=mine", 2, "untested"),
    "normed on two": Typed(NORMED, f"{_ON_TWO} trainer.max_steps=2"),
    "synced": Typed(NORMED, f"trainer.sync_batchnorm=true {_ON_TWO}", code=2),
    "synced under DeepSpeed": Typed(NORMED, "trainer.sync_batchnorm=true strategy=deepspeed_stage_1", code=2),
    "Lightning's own": Typed(
        f"{_BORING}.ManualOptimBoringModel",
        f"data._target_={_BORING}.BoringDataModuleNoLen trainer.max_steps=4 {_ON_TWO}",
    ),
}


def _steps(run: Finished) -> int:
    """How many were logged, from 0 on."""
    steps = list(run.column("train/loss"))
    return len(steps) if steps == list(range(len(steps))) else -1


def _validated(metric: str = "val/loss") -> Look:
    return lambda run: list(run.column(metric))


def _best_step(run: Finished) -> int:
    state = torch.load(run.run_dir / "checkpoints/best.ckpt/trainer.pt", weights_only=True)
    return int(state["global_step"])


def _is_best(metric: str, best: Callable[..., float]) -> Look:
    def look(run: Finished) -> bool:
        values = run.column(metric)
        return _best_step(run) == best(values, key=values.__getitem__) + 1

    return look


def _checkpoints(run: Finished) -> list[str]:
    return sorted(path.name for path in (run.run_dir / "checkpoints").iterdir())


def _times_told(words: str) -> Look:
    return lambda run: run.out.count(words)


def _samples_a_step(run: Finished) -> set[int]:
    """As the speeds in samples and in batches say."""
    speeds, seconds = run.column("throughput/samples_per_second"), run.column("throughput/step_seconds")
    return {round(speeds[step] * seconds[step]) for step in speeds}


def _rates(run: Finished) -> list[float]:
    rates = run.column("lr-SGD")
    return [round(rates[step], 5) for step in (0, 5, 10, 15)]


_HALVED = [0.05, 0.025, 0.0125, 0.00625]
HABITS = (
    # How long a run is, and when it validates
    Habit("trainer.max_epochs alone", "epochs", look=_steps, found=20),
    Habit("epochs, and no word of validation", "epochs", look=_validated("val_loss"), found=[4, 9, 14, 19]),
    Habit("epochs and steps: what comes first", "epochs and steps", look=_steps, found=7),
    Habit("val_check_interval in epochs", "epochs, validated by steps", look=_validated(), found=[3, 7]),
    Habit("check_val_every_n_epoch", "steps, validated by epochs", look=_validated("val_acc"), found=[4, 9]),
    Habit("trainer.max_steps alone", "steps", look=_steps, found=10),
    Habit("val_check_interval in steps", "steps", look=_validated("val_loss"), found=[3, 7]),
    Habit("trainer.max_time: no default ends it", "time", look=lambda run: _steps(run) > 0, found=True),
    Habit("fewer steps than the default between validations", "normed on two", look=_validated(), found=[1]),
    # Names of Lightning's
    Habit("data.batch_size=20", "epochs", "accumulation 1; data.batch_size=20 limits the evaluation batch size\n"),
    Habit("trainer.strategy=ddp", "epochs and steps", "strategy   DDP, precision 32-true, 1 node × 2 CPU"),
    Habit("ckpt_path=last", "last", ".ckpt, at step 4", _times_told("resumes    runs/plainmodel/mine/"), 1),
    Habit("a line to go on, pasted later", "last", look=_times_told(" ckpt_path=last"), found=0),
    Habit(
        "validation in more steps than an epoch has",
        "validations too rare",
        "error: trainer.val_check_interval=100 is more steps than an epoch has; type fewer, or "
        "trainer.check_val_every_n_epoch=null, which counts steps across epochs",
    ),
    Habit("ckpt_path=PATH", "path", "resumes    runs/plainmodel/mine/checkpoints/step_4.ckpt, at step 4"),
    Habit("ckpt_path=best", "best", "reads      runs/plainmodel/mine/checkpoints/best.ckpt"),
    Habit(
        *("a module without test_step", "untested"),
        " mode=validate ckpt_path=runs/untestedmodel/mine/checkpoints/best.ckpt\n",
    ),
    Habit(
        *("mode=test without test_step", "untested, tested"),
        "error: mode=test: UntestedModel has no test_step; type mode=validate or mode=predict\n",
    ),
    # What the best checkpoint and early stopping go by
    Habit("a loss named val_loss", "epochs", "best       is the lowest val_loss\n", _is_best("val_loss", min), True),
    Habit(
        *("a loss named validation_loss", "another name", "best       is the lowest validation_loss\n"),
        *(_is_best("validation_loss", min), True),
    ),
    Habit(
        *("accuracy alone", "steps, validated by epochs", "best       is the highest val_acc\n"),
        *(_is_best("val_acc", max), True),
    ),
    Habit("a monitor that is typed", "steps", look=_is_best("val_acc", max), found=True),
    Habit("a monitor that is typed is no news", "steps", look=_times_told("best       "), found=0),
    Habit(
        *("no metric", "no metric", "best       is not saved: validation has logged no metric; type "),
        *(_times_told("best       "), 1),
    ),
    Habit("no metric: the last are kept", "no metric", look=_checkpoints, found=["last.ckpt", "step_10.ckpt"]),
    Habit(
        *(
            "metrics, and a loss of training alone",
            "no loss",
            "not saved: validation has logged val_acc, val_nll; type callbacks.best_",
        ),
        *(_times_told("best       "), 1),
    ),
    Habit(
        *("a monitor that is misspelt", "misspelt"),
        "error: monitor=val_los: the run has logged train/loss, val_loss. Did you mean val_loss?\n",
    ),
    Habit("a metric that turns NaN", "nan", "best       is not step 10, because val_loss is nan\n", _best_step, 5),
    Habit("a metric that is NaN", "nan at once", look=lambda run: "best.ckpt" in _checkpoints(run), found=False),
    Habit(
        *("early stopping, also when resumed", "stops early, resumed"),
        look=lambda run: len(run.column("val_acc")),  # the first is the best, and three are no better by ten
        found=4,
    ),
    # Modules that optimize by hand
    Habit(
        *("two optimizers by hand", "by hand", "manual     ManualModel uses manual optimization, with 2 optimizers: "),
        *(_times_told("manual     "), 1),
    ),
    Habit("a bar by hand", "by hand", "\nbatch 10/10 · step 20 · loss ", _times_told("batch 11"), 0),
    Habit(
        "checkpoints by hand",
        "by hand",
        look=_checkpoints,
        found=["best.ckpt", "last.ckpt", "step_16.ckpt", "step_20.ckpt"],
    ),
    Habit("a log by hand", "by hand", look=_steps, found=10),
    Habit("validation by hand", "by hand", look=_validated(), found=[4, 9]),
    Habit("samples by hand", "by hand", look=lambda run: run.column("samples")[9], found=400.0),
    Habit("speed by hand", "by hand", look=_samples_a_step, found={40}),
    Habit("no clipping by hand", "by hand", look=lambda run: len(set(run.column("val/loss").values())), found=2),
    Habit("trainer.max_steps by hand", "by hand to a step", "\nstep 12/12 · batch 6 · loss ", _steps, 6),
    Habit("a line to go on by hand", "by hand to a step", "run_id=mine trainer.max_steps=24\n"),
    Habit("a resume by hand", "by hand, resumed", "/step_12.ckpt, at step 12, batch 6, with trainer.max_steps=20 (was"),
    Habit(
        *("trainer.gradient_clip_val by hand", "by hand, clipped"),
        "error: trainer.gradient_clip_val: ManualModel uses manual optimization, for which Lightning does not clip "
        "gradients; call self.clip_gradients in its training_step, and leave trainer.gradient_clip_val out\n",
    ),
    Habit(
        *("micro batches by hand", "by hand, micro batches"),
        "error: micro_batch_size=20: ManualModel uses manual optimization, which steps in each micro-batch; "
        "leave it out, or type global_batch_size=20 for steps of that size\n",
    ),
    Habit(
        *("two optimizers, and automatic_optimization", "several optimizers"),
        "error: model: AutomaticGanModel has several optimizers, but Lightning steps only one automatically; set "
        "self.automatic_optimization = False in its constructor, and step them in training_step\n",
    ),
    Habit("a GAN under ddp", "gan", "\nstep 4/4 · batch 2 · loss ", _steps, 2),
    Habit(
        *("on_nan=skip by hand", "by hand, nan", "skips      step 6, whose loss is not finite\n"),
        *(lambda run: all(map(math.isfinite, run.column("val/loss").values())), True),
    ),
    # Schedules
    Habit("ReduceLROnPlateau", "plateau", "validates  once an epoch, because ReduceLROnPlateau", _rates, _HALVED),
    Habit("ReduceLROnPlateau validates", "plateau", look=_validated(), found=[4, 9, 14, 19]),
    Habit("ReduceLROnPlateau on two devices", "plateau, cut", look=_rates, found=_HALVED),
    # Batch norm
    Habit(
        *("a batch norm on two devices", "normed on two", "so the training curve depends on the number of devices\n"),
        *(_times_told("batch norm net.1: its statistics"), 1),
    ),
    Habit(
        *("a batch norm in micro batches", "epochs, validated by steps"),
        *("so the training curve depends on micro_batch_size; leave that out", _times_told("batch norm net.1"), 1),
    ),
    Habit("a batch norm in whole batches", "time", look=_times_told("batch norm"), found=0),
    Habit(
        *("trainer.sync_batchnorm on CPUs", "synced"),
        "error: trainer.sync_batchnorm=true needs GPUs, because torch's SyncBatchNorm does; leave it out on CPUs\n",
    ),
    Habit(
        *("trainer.sync_batchnorm under DeepSpeed", "synced under DeepSpeed"),
        "error: trainer.sync_batchnorm=true is not supported under DeepSpeed; use strategy=ddp or fsdp\n",
    ),
    Habit("dropout on two devices", "epochs and steps", "\ndropout    net.2: each micro batch draws its own random "),
    Habit("dropout of 0 on two devices", "plateau, cut", look=_times_told("dropout"), found=0),
    # Modules of Lightning's own tests; BoringModel under each strategy: strategies/shapes/modules.py
    Habit(
        *("ManualOptimBoringModel, and data without a length", "Lightning's own"),
        *("stream     2 readers", _checkpoints, ["last.ckpt", "step_4.ckpt"]),
    ),
    # What can't be trained
    Habit(
        *("model._target_ of no LightningModule", "no module"),
        "error: model._target_=torch.nn.ReLU: found a ReLU, expected lightning.pytorch's LightningModule\n",
    ),
    Habit(
        *("data._target_ of no LightningDataModule", "no module"),
        f"error: data._target_={_PLAIN}.Points: found a Points, expected lightning.pytorch's LightningDataModule\n",
    ),
    Habit(
        "an empty dataset", "empty", "error: data: a DataLoader that shuffles has no samples, because its dataset is"
    ),
    Habit("an empty dataset in order", "empty, in order", "error: the training set has no samples\n"),
)

# What other tests hold: the file, and what is to be found in it
ELSEWHERE = {
    "lr=, batch_size=, epochs=, gpus=, --strategy=ddp": ("config/test_hydra_errors.py", '"--strategy=ddp"'),
    "precision=bf16, strategy=dp": ("config/habits.py", '"precision=bf16"'),
    "trainer.accumulate_grad_batches": ("launch/test_trainer_arguments.py", '"accumulate_grad_batches"'),
    "trainer.profiler=simple": ("launch/test_launchers.py", '"trainer.profiler=simple"'),
    "on_nan=stop": ("failures/test_not_finite.py", "def test_a_run_stops_with_step_and_samples"),
    "on_nan=skip": ("failures/test_not_finite.py", "def test_a_step_is_skipped_on_all_ranks"),
    "on_nan=ignore": ("failures/test_not_finite.py", "def test_a_run_that_ignores_it_trains_on"),
    "parameters that take no part": ("strategies/test_ddp.py", "def test_unused_parameters_are_named"),
    "IterableDataset": ("batches/test_stream_runs.py", "def test_a_stream_has_the_curve_of_one_process"),
    "split_dataset_by_node": ("batches/test_stream_runs.py", "def test_a_stream_that_splits_itself_by_ranks"),
    "loaders of unequal lengths": ("batches/test_combined.py", "def test_a_shorter_loader_is_read_again"),
    "a data module's batch_size, and nothing else typed": ("launch/test_habits.py", "def test_a_batch_size_that_data"),
    "an average of weights by hand, under fsdp": ("strategies/test_fsdp.py", "def test_an_average_by_hand"),
    "EMAWeightAveraging": ("strategies/shapes/modules.py", "class Averaging"),
    "averages, sharded": ("launch/test_averaging.py", "def test_a_run_is_validated_and_resumed_by_its_averages"),
    "micro_batch_size=auto for BatchSizeFinder": (
        "launch/test_auto.py",
        "def test_micro_batch_size_auto_is_the_largest",
    ),
    "averaging in place of StochasticWeightAveraging": ("launch/test_averaging.py", "def test_a_run_tests_the_mean"),
    "BackboneFinetuning": ("strategies/shapes/modules.py", "class Unfreezing"),
    "EarlyStopping, ModelCheckpoint, Timer, sharded": (
        "launch/test_sharded_callbacks.py",
        "def test_they_go_on_under_one_sharded_strategy",
    ),
    "callbacks beside one another": ("launch/test_callbacks.py", "def test_callbacks_that_a_run_serves"),
    "hooks in Lightning's order": ("launch/test_hook_order.py", "def test_a_fit_and_its_test_call"),
    "print in a module": ("monitoring/test_progress.py", "def test_what_a_module_prints"),
}
