"""The metric that the best checkpoint and early stopping go by, found among what a module logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightswitch.monitoring import objective
from lightswitch.monitoring.monitored import BestCheckpoint
from tests.engine.monitoring.tiny import Regression, loader, trainer

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
    trainer(folder, callbacks=[found], enable_checkpointing=True, max_epochs=1).fit(model, loader())
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
    assert all(map(objective.tells_mode, (*lowest, *highest))) is False  # of two words, the last decides, and is told
    told = {
        name: objective.tells_mode(name) for name in ("val/anything", "val/acc_at_distance", "val/score", "val/loss")
    }
    assert told == {"val/anything": False, "val/acc_at_distance": False, "val/score": True, "val/loss": True}
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
    of_first = "type callbacks.best_checkpoint.monitor=NAME for another's"
    assert [message.endswith(of_first) for message in caplog.messages if "best" in message] == [True] * (
        found != monitor
    )


def test_what_several_loaders_have_logged_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    best(tmp_path, names=("val/nll", "val/acc"))
    (line,) = (message for message in caplog.messages if "best" in message)
    named = ", ".join(f"val/{name}/dataloader_idx_{index}" for name in ("acc", "nll") for index in (0, 1))
    assert f"best       is not saved: validation has logged {named}; type callbacks.best_checkpoint.monitor=" in line


def test_a_name_that_is_logged_for_all_loaders_comes_first() -> None:
    assert objective.find(["val/loss", *LOADERS], None) == "val/loss"
    assert objective.find([*reversed(LOADERS)], None) == LOADERS[0]
    assert objective.find([*LOADERS, "val/acc"], "validation_loss") == LOADERS[0]
    assert objective.find(LOADERS, "val/acc") is None


def test_a_direction_that_no_name_tells_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightswitch")
    assert best(tmp_path, "val/agreement", ("val/agreement",)).mode == "min"
    (line,) = (message for message in caplog.messages if "best" in message)
    assert line.endswith("callbacks.best_checkpoint.mode=max makes it the highest")
