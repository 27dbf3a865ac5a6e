import csv
import pickle
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor

from lightswitch.errors import Refused
from lightswitch.monitoring.metrics import MetricsFile
from tests.engine.monitoring.tiny import BATCH, Engine, Regression, loader, trainer


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


def test_losses_keep_every_digit(tmp_path: Path) -> None:
    logger = MetricsFile(tmp_path)
    logger.log_metrics({"train/loss": 0.1 + 0.2, "val/loss": torch.tensor(1 / 3, dtype=torch.float64)}, step=0)
    (row,) = rows(tmp_path)
    assert (float(row["train/loss"]), float(row["val/loss"])) == (0.1 + 0.2, 1 / 3)


def test_several_calls_for_a_step_share_its_row(tmp_path: Path) -> None:
    logger = MetricsFile(tmp_path)
    logger.log_metrics({"samples": 64, "train/loss": 2.0}, step=9)
    logger.log_metrics({"grad_norm": 1.5}, step=9)
    logger.log_metrics({"train/loss": 1.0}, step=9)
    assert rows(tmp_path) == [{"step": "9", "samples": "64", "train/loss": "1.0", "grad_norm": "1.5"}]


def test_a_row_without_samples_takes_the_previous_ones(tmp_path: Path) -> None:
    logger = MetricsFile(tmp_path)
    logger.log_metrics({"samples": 64}, step=9)
    logger.log_metrics({"test/loss": 1.0}, step=10)
    logger.log_metrics({"test/loss": 2.0}, step=4)  # an older checkpoint's: how many is not known
    assert column(tmp_path, "samples") == ["", "64", "64"]


def test_an_older_checkpoints_evaluation_joins_the_row_of_its_step(tmp_path: Path) -> None:
    logger = MetricsFile(tmp_path)
    for step in (4, 9):
        logger.log_metrics({"samples": 8 * step, "epoch": step // 4, "train/loss": 1.0}, step=step)
    logger.log_metrics({"test/loss": 3.0, "epoch": 3}, step=4)  # the epoch that Lightning counts when it tests
    logger.log_metrics({"test/loss": 2.0, "epoch": 3}, step=10)
    assert column(tmp_path, "step") == ["4", "9", "10"]
    assert column(tmp_path, "test/loss") == ["3.0", "", "2.0"]
    assert column(tmp_path, "epoch") == ["1", "2", "3"]


def test_what_is_logged_for_an_earlier_step_is_a_row_before_the_later_ones(tmp_path: Path) -> None:
    logger = MetricsFile(tmp_path)
    logger.log_metrics({"samples": 9600, "train/loss": 2.0}, step=149)
    logger.log_metrics({"fid": 33.0}, step=1)  # as by step=self.current_epoch
    logger.log_metrics({"fid": 30.0}, step=2)
    logger.log_metrics({"val/loss": 1.5}, step=149)
    logger.log_metrics({"test/loss": 1.4})
    assert column(tmp_path, "step") == ["1", "2", "149"]
    assert rows(tmp_path)[2] == {
        **{"step": "149", "samples": "9600", "train/loss": "2.0"},
        **{"fid": "", "val/loss": "1.5", "test/loss": "1.4"},
    }


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


def test_half_a_line_of_a_killed_process_is_overwritten(tmp_path: Path) -> None:
    MetricsFile(tmp_path).log_metrics({"samples": 8, "train/loss": 1.0}, step=0)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("1,16,0.")
    MetricsFile(tmp_path).log_metrics({"samples": 16, "train/loss": 0.5}, step=1)
    assert column(tmp_path, "step") == ["0", "1"]
    assert column(tmp_path, "train/loss") == ["1.0", "0.5"]


def test_a_second_writer_loses_no_row_of_the_first(tmp_path: Path) -> None:
    training, evaluation = MetricsFile(tmp_path), MetricsFile(tmp_path)
    training.log_metrics({"samples": 8, "train/loss": 1.0}, step=0)
    evaluation.log_metrics({"test/loss": 3.0}, step=0)
    training.log_metrics({"samples": 16, "train/loss": 0.5}, step=1)
    assert column(tmp_path, "train/loss") == ["1.0", "0.5"]
    assert column(tmp_path, "test/loss") == ["3.0", ""]


def test_a_logger_that_has_written_can_be_sent_to_a_spawned_process(tmp_path: Path) -> None:
    logger = MetricsFile(tmp_path)
    logger.log_metrics({"samples": 8}, step=0)
    pickle.loads(pickle.dumps(logger)).log_metrics({"samples": 16}, step=1)
    logger.log_metrics({"samples": 24}, step=2)
    assert column(tmp_path, "samples") == ["8", "16", "24"]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    fit_and_test(tmp_path, strategy="ddp_fork", devices=2)
    assert [row["step"] for row in rows(tmp_path) if row["train/loss"]] == ["4", "9", "14", "19"]
    assert len([value for value in column(tmp_path, "test/loss") if value]) == 1
    assert column(tmp_path, "samples")[-1] == str(20 * BATCH)


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


@pytest.mark.parametrize(
    ("harm", "steps"),
    [
        ((b"9,", b"9\xff,"), ["19", "29"]),
        ((b"19,", b"1\x009,"), ["9", "29"]),
        ((b"\n19,64", b""), ["29"]),
        ((b".0\n19,64,", b"\0" * 9), ["29"]),
        ((b"\n19,64,", b""), ["29"]),
        ((b"step", b"\xfe\xff"), ["29"]),
        ((b"step,samples", b"9,64"), ["29"]),
    ],
    ids=[
        "no text",
        "a zero byte",
        "two rows in a line",
        "two rows joined by zeros",
        "two rows joined",
        "no header",
        "a header that is lost",
    ],
)
def test_a_file_with_lines_that_are_no_rows_is_kept_beside(
    harm: tuple[bytes, bytes], steps: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (9, 19):
        MetricsFile(tmp_path).log_metrics({"samples": 64, "train/loss": 2.0}, step)
    path = tmp_path / "metrics.csv"
    damaged = path.read_bytes().replace(*harm, 1)
    path.write_bytes(damaged)
    for _ in range(2):
        MetricsFile(tmp_path).log_metrics({"samples": 64, "train/loss": 1.0}, 29)
    assert column(tmp_path, "step") == steps
    assert [other.read_bytes() for other in tmp_path.glob("metrics_damaged_*")] == [damaged]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has lines that can't be read; saved a copy as metrics_damaged_1.csv and removed those lines"
    ]


def test_a_table_that_was_removed_is_not_begun_anew(tmp_path: Path) -> None:
    logger = MetricsFile(tmp_path / "run")
    logger.log_metrics({"train/loss": 1.0}, 0)
    (tmp_path / "run").rename(tmp_path / "removed")
    with pytest.raises(Refused, match=r"metrics\.csv was removed while the run wrote to it; start the run again"):
        logger.log_metrics({"train/loss": 0.5}, 1)
    assert not (tmp_path / "run").exists()
