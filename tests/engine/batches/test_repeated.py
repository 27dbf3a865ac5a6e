"""An evaluation set of fewer samples than ranks is evaluated, each sample once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAUROC

from tests.engine.conftest import Train
from tests.engine.curves import largest_difference, predictions
from tests.engine.fits import Fit, Fits
from tests.engine.plain import PlainData, PlainModel, Points
from tests.night import at_night


class FewData(PlainData):
    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(Points(3, 1), batch_size=8), DataLoader(Points(9, 4), batch_size=8)]

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Points(2, 2), batch_size=8)

    predict_dataloader = test_dataloader


class FewToPredict(PlainData):
    predict_dataloader = FewData.predict_dataloader


class LogsAll(PlainModel):
    """Of a loader of 3 samples and of one of 9, the same metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.curve, self.mean, self.highest = MulticlassAUROC(4), MeanMetric(), MaxMetric()

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        each = cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.log("mean", each.mean())
        if dataloader_idx == 0:
            self.log("both", each.mean(), on_step=True, on_epoch=True, add_dataloader_idx=False)
        self.log("of_lightning", each.mean(), sync_dist=True)
        for name in ("sum", "min", "max"):
            self.log(name, getattr(torch, name)(each), reduce_fx=name)
        self.curve.update(self.net(batch[0]), batch[1])
        self.mean.update(each)
        self.highest.update(each)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def on_validation_epoch_end(self) -> None:
        for name in ("curve", "mean", "highest"):
            metric = getattr(self, name)
            self.log(f"at_end/{name}", metric.compute())
            metric.reset()


FEW = Fit(LogsAll, FewData, steps=2)
NAMES = [
    "both_epoch",
    *(f"{name}/dataloader_idx_{i}" for name in ("mean", "of_lightning", "sum", "min", "max") for i in (0, 1)),
]
NAMES += ["at_end/curve", "at_end/mean", "at_end/highest", "test/loss", "test/accuracy"]


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets:UserWarning")  # of 12 samples, by class
@pytest.mark.parametrize("strategy", ["fsdp", *at_night("ddp")])
def test_four_ranks_tell_of_three_samples_what_one_does(strategy: str, fits: Fits) -> None:
    (alone,), ranks = fits(FEW), fits(replace(FEW, strategy=strategy), 4)
    for name in NAMES:
        assert largest_difference(ranks[0], alone, name) <= 1e-5, name


def test_what_is_predicted_of_another_ranks_sample_is_left_out(train: Train, tmp_path: Path) -> None:
    data = "data._target_=tests.engine.batches.test_repeated.FewToPredict"
    run = train("model._target_=tests.engine.plain.PlainModel", data, "trainer.max_steps=1", "trainer.accelerator=cpu")
    read = (f"ckpt_path={run.run_dir}/checkpoints/last.ckpt", "mode=predict", "trainer.accelerator=cpu")
    model = ("model._target_=tests.engine.plain.PlainModel", data)
    one, four = (train(*model, *read, *words, ranks=ranks) for words, ranks in (((), 0), (("strategy=ddp",), 4)))
    assert len(predictions(four)) == 2
    assert torch.equal(predictions(four), predictions(one))
