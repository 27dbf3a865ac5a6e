"""What Lightning's users have in their modules and fingers does what its name says, or a line says what to type."""

from __future__ import annotations

import re

import pytest
import torch
from omegaconf import OmegaConf

from tests.engine.conftest import PLAIN, Train
from tests.engine.processes import TRAIN_PY, Start, said

RUN = (
    *PLAIN,
    "logger=csv",
    "~callbacks.lr_monitor",
    "global_batch_size=40",
    "trainer.log_every_n_steps=1",
)  # 5 an epoch


# How long, and how often


@pytest.mark.parametrize(
    ("typed", "steps", "validated"),
    [
        (("trainer.max_epochs=2",), 10, [4, 9]),
        (("trainer.max_epochs=2", "trainer.max_steps=7"), 7, [4]),
        (("trainer.max_epochs=2", "trainer.val_check_interval=4", "trainer.check_val_every_n_epoch=null"), 10, [3, 7]),
        (("trainer.max_steps=10", "trainer.check_val_every_n_epoch=1"), 10, [4, 9]),
        (("trainer.max_steps=10", "trainer.val_check_interval=4"), 10, [3, 7]),
    ],
)
def test_a_run_ends_and_validates_by_what_was_typed_and_not_by_a_default(
    typed: tuple[str, ...], steps: int, validated: list[int], train: Train
) -> None:
    run = train(*RUN, *typed)
    assert list(run.column("train/loss")) == list(range(steps))
    assert list(run.column("val/loss")) == validated


def test_a_run_ends_by_time_and_not_by_a_default(train: Train) -> None:
    run = train(*RUN, "trainer.max_time=00:00:00:05", "callbacks.last_checkpoint.every_n_steps=1000")
    trainer = OmegaConf.load(run.run_dir / "config.yaml").trainer
    assert (trainer.max_steps, trainer.get("max_epochs")) == (-1, None)  # so that nothing but time has ended it
    assert run.column("train/loss")


# What the best checkpoint and early stopping go by

NAMED = ("model._target_=tests.engine.plain.NamedModel", *RUN[1:], "trainer.max_epochs=4")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("model.loss=val_loss",), "best       is the lowest val_loss\n"),
        (("model.loss=validation_loss", "model.accuracy=val_acc"), "best       is the lowest validation_loss\n"),
        (("model.accuracy=val_acc",), "best       is the highest val_acc\n"),
        (("model.accuracy=val_acc", "model.loss=val_loss", "callbacks.best_checkpoint.monitor=val_acc"), ""),
    ],
)
def test_the_best_goes_by_what_the_module_logs(names: tuple[str, ...], told: str, train: Train) -> None:
    run = train(*NAMED, *names)
    assert told in run.out
    assert run.out.count("best       ") == bool(told)
    name = names[0].partition("=")[2]
    values = run.column(name)
    best = max(values, key=values.__getitem__) if name == "val_acc" else min(values, key=values.__getitem__)
    state = torch.load(run.run_dir / "checkpoints/best.ckpt/trainer.pt", weights_only=True)
    assert state["global_step"] == best + 1


@pytest.mark.parametrize("names", [(), ("model.accuracy=val_acc", "model.loss=val_nll")])
def test_a_run_without_a_metric_to_go_by_keeps_no_best_and_says_so_once(names: tuple[str, ...], train: Train) -> None:
    run = train(*NAMED, *names)
    logged = "val_acc, val_nll" if names else "no metric"
    line = f"best       is not kept: validation has logged {logged}; type callbacks.best_checkpoint.monitor=NAME\n"
    assert run.out.count(line) == 1
    assert sorted(path.name for path in (run.run_dir / "checkpoints").iterdir()) == ["last.ckpt", "step_20.ckpt"]


def test_a_monitor_that_is_asked_for_and_not_logged_is_refused_with_the_names_there_are(train: Train) -> None:
    typed = (*NAMED, "model.loss=val_loss", "callbacks.best_checkpoint.monitor=val_los")
    run = train(*typed, check=False)
    assert run.returncode == 2
    (line,) = run.err.splitlines()
    assert line == ("error: monitor=val_los: the run has logged train/loss, val_loss. Did you mean val_loss?")


def test_a_metric_that_is_not_finite_never_is_the_best(train: Train) -> None:
    run = train(*NAMED, "model.loss=val_loss", "model.nan_from_step=10", "trainer.max_epochs=4")
    assert "best       not step 10, where val_loss is nan\n" in run.out
    state = torch.load(run.run_dir / "checkpoints/best.ckpt/trainer.pt", weights_only=True)
    assert state["global_step"] == 5
    never = train(*NAMED, "model.loss=val_loss", "model.nan_from_step=0", "trainer.max_epochs=2")
    assert not (never.run_dir / "checkpoints/best.ckpt").exists()


def test_early_stopping_goes_by_what_the_module_logs_also_when_it_is_resumed(train: Train) -> None:
    stops = ("callbacks=[checkpoint,early_stopping]", "callbacks.early_stopping.min_delta=10", "run_id=mine")
    run = (
        *(word for word in NAMED if not word.startswith("~")),
        "model.accuracy=val_acc",
        *stops,
        "callbacks.early_stopping.patience=3",
    )
    begun = train(*run, "trainer.max_epochs=2")
    resumed = train(*run, "trainer.max_epochs=20", folder=begun.folder)
    assert len(resumed.column("val_acc")) == 4  # the first is the best, and three are no better by ten


# Modules that a default would stop


def test_a_default_clips_no_module_that_optimizes_by_hand_and_a_typed_one_is_refused(train: Train) -> None:
    by_hand = ("model._target_=tests.engine.plain.ManualModel", *RUN[1:], "trainer.max_epochs=2")
    run = train(*by_hand)
    assert run.column("val/loss")[9] < run.column("val/loss")[4]
    refused = train(*by_hand, "trainer.gradient_clip_val=0.5", check=False)
    assert (refused.returncode, refused.err) == (
        2,
        "error: trainer.gradient_clip_val: ManualModel optimizes by hand, which Lightning does not clip; call "
        "self.clip_gradients in its training_step, and leave trainer.gradient_clip_val out\n",
    )


@pytest.mark.parametrize("switches", [(), ("micro_batch_size=20",), ("strategy=ddp_fork", "trainer.devices=2")])
def test_a_schedule_by_epochs_that_goes_by_validation_finds_its_metric(switches: tuple[str, ...], train: Train) -> None:
    plateau = ("model._target_=tests.engine.plain.PlateauModel", *PLAIN[1:], "global_batch_size=40", "logger=csv")
    run = train(*plateau, "trainer.max_steps=20", "trainer.log_every_n_steps=1", *switches)
    assert "validates  once an epoch, as ReduceLROnPlateau goes by it" in run.out
    assert list(run.column("val/loss")) == [4, 9, 14, 19]
    rates = run.column("lr-SGD")
    assert [rates[step] for step in (0, 5, 10, 15)] == pytest.approx([0.05, 0.025, 0.0125, 0.00625])


def test_micro_batches_of_a_module_that_optimizes_by_hand_are_refused(train: Train) -> None:
    by_hand = ("model._target_=tests.engine.plain.ManualModel", *RUN[1:], "micro_batch_size=20")
    refused = train(*by_hand, check=False)
    assert (refused.returncode, refused.err) == (
        2,
        "error: micro_batch_size=20: ManualModel optimizes by hand, in each micro batch; leave it out, or "
        "type global_batch_size=20 for steps of that size\n",
    )


def test_what_is_no_module_and_no_data_is_refused(train: Train) -> None:
    others = ("model._target_=torch.nn.ReLU", "data._target_=tests.engine.plain.Points", "data.samples=8")
    refused = train(*others, *RUN[2:], check=False)
    assert (refused.returncode, refused.err.splitlines()) == (
        2,
        [
            "error: model._target_=torch.nn.ReLU: found a ReLU, expected lightning.pytorch's LightningModule",
            "error: data._target_=tests.engine.plain.Points: found a Points, expected lightning.pytorch's "
            "LightningDataModule",
        ],
    )


@pytest.mark.parametrize("shuffle", ["true", "false"])
def test_an_empty_dataset_is_told_in_a_line(shuffle: str, train: Train) -> None:
    empty = (RUN[0], "data._target_=tests.engine.plain.EmptyData", f"data.shuffle={shuffle}", *RUN[2:])
    refused = train(*empty, check=False)
    shuffled = "error: data: a DataLoader that shuffles has no samples, as its dataset is empty\n"
    told = shuffled if shuffle == "true" else "error: the training set has no samples\n"
    assert (refused.returncode, told in refused.err) == (2, True), refused.err


# Checkpoints


def test_ckpt_path_goes_on_from_a_checkpoint_as_it_does_in_lightning(train: Train) -> None:
    run = (*RUN, "run_id=mine", "callbacks.last_checkpoint.every_n_steps=2")
    begun = train(*run, "trainer.max_steps=4", "trainer.val_check_interval=2")
    last = train(*run, "trainer.max_steps=6", "ckpt_path=last", folder=begun.folder)
    assert re.search(r"resumes    runs/plainmodel/mine/checkpoints/\w+.ckpt, at step 4", last.out)
    assert "ckpt_path" not in re.findall("go on.*", last.out)[0], "pasted, it goes on from the newest"
    by_path = "ckpt_path=runs/plainmodel/mine/checkpoints/step_4.ckpt"
    other = train(*run, "trainer.max_steps=6", by_path, "run_id=other", folder=begun.folder)
    assert "resumes    runs/plainmodel/mine/checkpoints/step_4.ckpt, at step 4" in other.out
    tested = train(*run, "mode=test", "ckpt_path=best", folder=begun.folder)
    assert "reads      runs/plainmodel/mine/checkpoints/best.ckpt" in tested.out


# What is said of a module and its data


@pytest.mark.parametrize(
    ("switches", "told"),
    [
        (("strategy=ddp_fork", "trainer.devices=2"), "so the curve follows the number of devices"),
        (("micro_batch_size=20",), "so the curve follows micro_batch_size; leave that out where the memory allows it"),
        ((), None),
    ],
)
def test_a_batch_norm_is_told_once_where_the_curve_follows_the_cut(
    switches: tuple[str, ...], told: str | None, train: Train
) -> None:
    normed = ("model._target_=tests.engine.plain.NormedModel", *RUN[1:], "trainer.max_steps=2")
    lines = [line for line in train(*normed, *switches).out.splitlines() if line.startswith("batch norm")]
    assert len(lines) == (told is not None)
    assert all(line.startswith("batch norm net.1: its statistics") and line.endswith(told) for line in lines)


def test_a_batch_norm_that_cannot_be_synchronised_is_refused(train: Train) -> None:
    synced = (*RUN, "trainer.sync_batchnorm=true")
    refused = train(*synced, "strategy=ddp_fork", "trainer.devices=2", check=False)
    told = "trainer.sync_batchnorm=true is for GPUs, as torch's synchronised batch norm is; leave it out on CPUs"
    assert (refused.returncode, refused.err) == (2, f"error: {told}\n")
    refused = train(*synced, "strategy=deepspeed_stage_1", check=False)
    told = "trainer.sync_batchnorm=true is not done under DeepSpeed; use strategy=ddp or fsdp"
    assert (refused.returncode, refused.err) == (2, f"error: {told}\n")


def test_a_batch_size_of_the_data_is_answered_by_the_name_that_it_has_here(train: Train) -> None:
    run = train(*RUN, "data.batch_size=20", "trainer.max_steps=2")
    assert (
        "advice     data.batch_size is not what a step takes where batches are cut here; type global_batch_size=20"
        in run.out
    )


def test_a_table_of_lightnings_profiler_is_shown(start: Start) -> None:
    """Of a process of its own: where Lightning is imported first, as in the others, its loggers go elsewhere."""
    told = said(start("python", TRAIN_PY, *RUN, "trainer.profiler=simple", "trainer.max_steps=2"))
    assert "FIT Profiler Report" in told, told


def test_lightnings_name_of_a_strategy_is_the_choice_of_that_name(train: Train) -> None:
    run = train(*RUN, "trainer.strategy=ddp_fork", "trainer.devices=2", "trainer.max_steps=2")
    assert "strategy   DDP, precision 32-true, 1 node × 2 CPU" in run.out
