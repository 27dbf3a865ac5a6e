from __future__ import annotations

import csv
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.loop.loops import replace_loops
from lightswitch.monitoring import objective
from lightswitch.monitoring.metrics import MetricsFile, Results
from lightswitch.monitoring.monitored import BestCheckpoint
from tests.engine.monitoring.tiny import Engine, Regression, loader, trainer


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def columns(directory: Path) -> list[str]:
    return (directory / "metrics.csv").read_text().splitlines()[0].split(",")


def column(directory: Path, name: str) -> list[str]:
    return [row[name] for row in rows(directory)]


def fit_and_test(directory: Path, **options: object) -> None:
    run = trainer(directory, logger=MetricsFile(directory), callbacks=[Engine()], **options)
    model = Regression()
    run.fit(model, loader(), loader(16))
    run.test(model, loader(16), verbose=False)


def test_a_run_fills_one_row_a_step(tmp_path: Path) -> None:
    fit_and_test(tmp_path, val_check_interval=10)
    assert columns(tmp_path) == ["step", "samples", "epoch", "train/loss", "val/loss", "test/loss"]
    assert column(tmp_path, "step") == ["4", "9", "14", "19", "20"]
    assert column(tmp_path, "samples") == ["40", "80", "120", "160", "160"]
    assert [bool(row["val/loss"]) for row in rows(tmp_path)] == [False, True, False, True, False]
    assert [bool(row["train/loss"]) for row in rows(tmp_path)] == [True, True, True, True, False]


TRAINED = [({"samples": 8 * step, "epoch": step // 4, "train/loss": 1.0}, step) for step in (4, 9)]
CALLS = {  # what is logged, and the file that it makes
    "several calls for a step share its row, and the last value counts": (
        [({"samples": 64, "train/loss": 2.0}, 9), ({"grad_norm": 1.5}, 9), ({"train/loss": 0.1 + 0.2}, 9)],
        ["step,samples,train/loss,grad_norm", f"9,64,{0.1 + 0.2},1.5"],
    ),
    "a tensor keeps every digit": (
        [({"loss": torch.tensor(1 / 3, dtype=torch.float64)}, 0)],
        ["step,samples,loss", f"0,,{1 / 3}"],
    ),
    "a row without samples takes the previous ones": (
        [({"samples": 64}, 9), ({"test/loss": 1.0}, 10), ({"test/loss": 2.0}, 4)],  # how many by step 4 is not known
        ["step,samples,test/loss", "4,,2.0", "9,64,", "10,64,1.0"],
    ),
    "an evaluation of an older checkpoint joins the row of its step": (  # and epoch: Lightning counts another in a test
        [*TRAINED, ({"test/loss": 3.0, "epoch": 3}, 4), ({"test/loss": 2.0, "epoch": 3}, 10)],
        ["step,samples,epoch,train/loss,test/loss", "4,32,1,1.0,3.0", "9,72,2,1.0,", "10,72,3,,2.0"],
    ),
    "of a table whose rows have all been dropped the next is the first": (
        [({"val/loss": 1.0}, 5), ({"train/loss": 2.0}, 3), ({}, 4)],
        ["step,samples,val/loss,train/loss", "3,,,2.0", "4,,,"],
    ),
    "what is logged for an earlier step is a row before the later ones": (  # as by step=self.current_epoch
        [
            ({"samples": 9600, "train/loss": 2.0}, 149),
            ({"fid": 33.0}, 1),
            ({"fid": 30.0}, 2),
            ({"test/loss": 1.4}, None),
        ],
        ["step,samples,train/loss,fid,test/loss", "1,,,33.0,", "2,,,30.0,", "149,9600,2.0,,1.4"],
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_is_logged_is_a_row_a_step_in_the_order_of_steps(case: str, tmp_path: Path) -> None:
    logger, (calls, lines) = MetricsFile(tmp_path), CALLS[case]
    for values, step in calls:
        logger.log_metrics(values, step=step)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == lines


def test_a_resumed_run_leaves_the_file_of_one_uninterrupted_run(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for directory, legs in ((whole, [40]), (resumed, [30, 40])):
        for steps in legs:
            checkpoint = directory / "at_20.ckpt"
            run = trainer(
                directory,
                logger=MetricsFile(directory),
                callbacks=[LearningRateMonitor("step"), Engine(), SaveAt(20, checkpoint)],
                max_steps=steps,
                val_check_interval=10,
            )
            run.fit(Scheduled(), loader(), loader(16), ckpt_path=checkpoint if checkpoint.exists() else None)
    assert (resumed / "metrics.csv").read_text() == (whole / "metrics.csv").read_text()


def test_a_run_that_is_resumed_at_its_last_step_tests_in_the_same_epoch(tmp_path: Path) -> None:
    checkpoint = tmp_path / "at_5.ckpt"  # within an epoch
    for name in ("whole", "resumed"):
        callbacks = [GlobalBatch(BatchPlan.derive(8, 8, 1), seed=1), SaveAt(5, checkpoint)]
        run = trainer(tmp_path, logger=MetricsFile(tmp_path / name), callbacks=callbacks, max_steps=5)
        replace_loops(run)
        model = Regression()
        run.fit(model, loader(), loader(16), ckpt_path=checkpoint if name == "resumed" else None)
        run.test(model, loader(16), verbose=False)
    epochs = [[row["epoch"] for row in rows(tmp_path / name) if row["test/loss"]] for name in ("whole", "resumed")]
    assert epochs == [["1"], ["1"]]


def test_a_finished_run_that_is_started_again_or_evaluated_keeps_its_rows(tmp_path: Path) -> None:
    checkpoint = tmp_path / "at_20.ckpt"
    for _ in range(2):
        run = trainer(tmp_path, logger=MetricsFile(tmp_path), callbacks=[Engine(), SaveAt(20, checkpoint)])
        run.fit(Regression(), loader(), loader(16), ckpt_path=checkpoint if checkpoint.exists() else None)
    before = rows(tmp_path)
    assert [row["step"] for row in before] == ["4", "9", "14", "19"]
    assert all(row["train/loss"] for row in before)
    run = trainer(tmp_path, logger=MetricsFile(tmp_path))
    run.validate(Regression(), loader(16), verbose=False)
    run.test(Regression(), loader(16), verbose=False)
    assert [{name: row[name] for name in before[0]} for row in rows(tmp_path) if row["train/loss"]] == before


def test_half_a_line_is_overwritten(tmp_path: Path) -> None:
    MetricsFile(tmp_path).log_metrics({"samples": 8, "train/loss": 0.5}, step=1)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,24,0.123456789")
    MetricsFile(tmp_path).log_metrics({"samples": 24, "train/loss": 0.25}, step=2)
    assert column(tmp_path, "train/loss") == ["0.5", "0.25"]


class Scheduled(Regression):
    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SaveAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self._step, self._path = step, path

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)


HARMED = {  # what is replaced in the file, and by what; the steps whose rows remain
    "no text": (b"9,", b"9\xff,", ["19"]),
    "a zero byte": (b"19,", b"1\x009,", ["9"]),
    "zeros over the end of a row": (b"2.0\n19", b"\0\0\0\09", []),
    "two rows in a line": (b"\n19,64", b"", []),
    "no header": (b"step", b"\xfe\xff", []),
    "a header that is lost": (b"step,samples", b"9,64", []),
}


@pytest.mark.parametrize("harm", HARMED)
def test_lines_that_are_no_rows_are_dropped(harm: str, tmp_path: Path) -> None:
    for step in (9, 19):
        MetricsFile(tmp_path).log_metrics({"samples": 64, "train/loss": 2.0}, step)
    path, (found, harmed, steps) = tmp_path / "metrics.csv", HARMED[harm]
    path.write_bytes(path.read_bytes().replace(found, harmed, 1))
    for _ in range(2):
        MetricsFile(tmp_path).log_metrics({"samples": 64, "train/loss": 1.0}, 29)
    assert column(tmp_path, "step") == [*steps, "29"]


def test_a_table_that_was_removed_is_not_begun_anew(tmp_path: Path) -> None:
    logger = MetricsFile(tmp_path / "run")
    logger.log_metrics({"train/loss": 1.0}, 0)
    (tmp_path / "run").rename(tmp_path / "removed")
    with pytest.raises(FileNotFoundError):
        logger.log_metrics({"train/loss": 0.5}, 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["loss", "a new column"])
def test_a_row_that_the_disk_does_not_take_is_of_a_named_file(name: str, tmp_path: Path) -> None:
    logger = MetricsFile(tmp_path)
    logger.log_metrics({"loss": 1.0}, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match=r"metrics\.csv'$"):
            logger.log_metrics({name: 1.0}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# What is logged is held as Lightning holds it


def test_a_metric_is_held_itself() -> None:
    results, metric = Results(training=True), MeanMetric()
    for value in (1.0, 3.0):
        metric(value)
        _log(results, metric)
    assert results.metrics(on_step=False)["callback"]["loss_epoch"] == 2


def test_a_step_and_its_epoch_show_what_lightning_shows() -> None:
    shown = []
    for results in (Results(training=True), _ResultCollection(training=True)):
        for value in (1.0, 2.0, 6.0):
            _log(results, torch.tensor(value))
        shown.append([{kind: dict(values) for kind, values in results.metrics(step).items()} for step in (True, False)])
    assert shown[0] == shown[1]
    assert shown[0][1]["callback"]["loss"] == 3


def _log(results: _ResultCollection, value: Any) -> None:
    results.log("training_step", "loss", value, on_step=True, on_epoch=True, batch_size=1)


# The metric that the best checkpoint and early stopping go by, found among what a module logs


LOADERS = ("val/loss/dataloader_idx_0", "val/loss/dataloader_idx_1")


class TwoSets(Regression):
    """Logs under any names for two validation loaders."""

    names: tuple[str, ...] = ("val/loss",)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        for name in self.names:
            self.log(name, self._loss(batch) + dataloader_idx)

    def val_dataloader(self) -> list[DataLoader]:
        return [loader(), loader()]


def best(folder: Path, monitor: str | None = None, names: tuple[str, ...] = ("val/loss",)) -> BestCheckpoint:
    """The callback after a short fit."""
    found = BestCheckpoint(monitor, dirpath=folder, filename="best")
    model = TwoSets()
    model.names = names
    trainer(folder, callbacks=[found], max_epochs=1).fit(model, loader())
    return found


def test_the_best_value_of_a_metric_follows_from_its_name() -> None:
    lowest = (
        *("val/loss", "val/mape", "val_top1_error", "val/brier_score", "fid_score", "val/acc_loss", "wer"),
        "val/mae",
    )
    highest = ("val/acc", "val_accuracy_top5", "val/mAP", "map_50", "val/MulticlassF1Score", "valid.auroc", "val/r2")
    assert {name: objective.mode(name) for name in (*lowest, *highest)} == {
        **dict.fromkeys(lowest, "min"),
        **dict.fromkeys(highest, "max"),
    }
    assert objective.mode("val/anything") == "min"
    assert objective.mode("val/error_recall") == objective.mode("cmAP") == "max"


@pytest.mark.parametrize(
    ("monitor", "names", "found"),
    [
        (None, ("val/loss",), LOADERS[0]),
        (None, ("val_loss", "val/acc"), "val_loss/dataloader_idx_0"),
        (None, ("val/acc",), "val/acc/dataloader_idx_0"),
        ("val/loss", ("val_loss",), "val_loss/dataloader_idx_0"),
        (LOADERS[1], ("val/loss",), LOADERS[1]),
    ],
)
def test_of_several_loaders_the_first_ones_metric_decides_or_that_which_is_typed(
    monitor: str | None, names: tuple[str, ...], found: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightswitch")
    callback = best(tmp_path, monitor, names)
    assert callback.monitor == found
    assert (tmp_path / "best.ckpt").exists()
    direction = objective.mode(found)
    assert [message for message in caplog.messages if "best" in message] == [
        f"best       is the {direction.replace('min', 'lowest').replace('max', 'highest')} {found}"
    ]


def test_a_run_that_finds_no_metric_for_its_best_checkpoint_lists_what_was_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best(tmp_path, names=("val/nll", "val/acc"))
    (line,) = (message for message in caplog.messages if "best" in message)
    named = ", ".join(f"val/{name}/dataloader_idx_{index}" for name in ("acc", "nll") for index in (0, 1))
    expected = f"of {named}, none is val/loss; type callbacks.best_checkpoint.monitor=NAME"
    assert line == f"best       is not saved: {expected}"


def test_a_name_that_is_logged_for_all_loaders_comes_first() -> None:
    assert objective.find(["val/loss", *LOADERS], None) == "val/loss"
    assert objective.find([*reversed(LOADERS)], None) == LOADERS[0]
    assert objective.find([*LOADERS, "val/acc"], "validation_loss") == LOADERS[0]
    assert objective.find(LOADERS, "val/acc") is None
