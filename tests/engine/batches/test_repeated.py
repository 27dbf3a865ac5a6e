"""An evaluation set of fewer samples than ranks is evaluated, each sample once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MaxMetric, MeanMetric, Metric
from torchmetrics.classification import MulticlassAUROC

from tests.engine.conftest import Train
from tests.engine.curves import largest_difference, predictions
from tests.engine.fits import Fit, Fits
from tests.engine.plain import Buckets, PlainData, PlainModel, Points
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


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets:UserWarning")  # of 12 samples, by class
@pytest.mark.parametrize("strategy", ["fsdp", *at_night("ddp")])
def test_four_ranks_tell_of_three_samples_what_one_does(strategy: str, fits: Fits) -> None:
    (alone,), ranks = fits(FEW), fits(replace(FEW, strategy=strategy), 4)
    for name in NAMES:
        assert largest_difference(ranks[0], alone, name) <= 1e-5, name


class Entries(Metric):
    """Keeps an entry for each sample, as metrics of texts and detections do, or for some samples."""

    def __init__(self, every: int, reduction: Any = None) -> None:
        super().__init__()
        self.every = every
        self.add_state("seen", default=[], dist_reduce_fx=reduction)

    def update(self, values: Tensor) -> None:
        self.seen += [value.reshape(-1) for value in values if value % self.every == 0]

    def compute(self) -> Tensor:
        seen = self.seen if isinstance(self.seen, Tensor) else torch.cat([torch.zeros(0), *self.seen])
        return (seen.double() * torch.arange(1, len(seen) + 1)).sum()  # depends on their order


class LogsEntries(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.some, self.joined = Entries(1), Entries(4), Entries(1, torch.cat)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for name in ("each", "some", "joined"):
            getattr(self, name).update(batch[2])
            self.log(f"val/{name}", getattr(self, name))


class ElevenData(PlainData):
    samples_to_validate = 11

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Points(self.samples_to_validate, 1), batch_size=4)


class ThreeData(ElevenData):
    samples_to_validate = 3


@pytest.mark.parametrize("data", [ThreeData, *at_night(ElevenData)])
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 4), *at_night(("ddp", 2), ("fsdp", 2))])
def test_ranks_gather_metrics_whose_entries_differ_in_number(
    strategy: str, ranks: int, data: type[PlainData], fits: Fits
) -> None:
    one = Fit(LogsEntries, data, steps=1)
    (alone,), run = fits(one), fits(replace(one, strategy=strategy), ranks)[0]
    for name in ("val/each", "val/some", "val/joined"):
        assert run.column(name) == alone.column(name), name


class Series(Dataset):
    """Series of other lengths, whose values are all the same."""

    def __init__(self, count: int) -> None:
        self.series = [torch.full((1 + at * 5 % 7, 2), float(at)) for at in range(count)]

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: int) -> Tensor:
        return self.series[index]


class SeriesStream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(Series(10).series)


class SeriesData(LightningDataModule):
    """Batches without a dimension of samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Series(16), batch_size=8, shuffle=True, collate_fn=list)

    def val_dataloader(self) -> DataLoader:
        if self.how == "stream":
            return DataLoader(SeriesStream(), batch_size=4, collate_fn=list)
        if self.how == "formed":
            return DataLoader(Series(10), batch_sampler=Buckets([1.0] * 10, 3.0), collate_fn=list)
        return DataLoader(Series(10), batch_size=4, collate_fn=lambda some: {"scale": torch.ones(3), "some": some})

    test_dataloader = val_dataloader


class OverSeries(PlainModel):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("train/value", torch.stack([one.mean() for one in batch]).mean(), on_step=False, on_epoch=True)
        return torch.stack([self.net(one).square().mean() for one in batch]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        series = batch["some"] if isinstance(batch, dict) else batch
        self.log("val/value", torch.stack([one.mean() for one in series]).mean())
        self.log("val/of_rows", torch.cat(series).mean(), batch_size=sum(map(len, series)))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("how", ["in order", "stream", "formed"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_batch_weighs_its_samples_whatever_the_shape_of_its_tensors(how: str, ranks: int, fits: Fits) -> None:
    strategy = "ddp" if ranks > 1 else "single"
    series = Fit(OverSeries, partial(SeriesData, how), strategy, global_batch=11, micro_batch=None, steps=2)
    run = fits(series, ranks)[0]
    assert [*run.column("train/value").values()] == pytest.approx([7.5])
    assert [*run.column("val/value").values()] == pytest.approx([4.5])
    rows = torch.cat(Series(10).series)
    assert [*run.column("val/of_rows").values()] == pytest.approx([float(rows.mean())])


def test_what_is_predicted_of_another_ranks_sample_is_left_out(train: Train, tmp_path: Path) -> None:
    data = "data._target_=tests.engine.batches.test_repeated.FewToPredict"
    run = train("model._target_=tests.engine.plain.PlainModel", data, "trainer.max_steps=1", "trainer.accelerator=cpu")
    read = (f"ckpt_path={run.run_dir}/checkpoints/last.ckpt", "mode=predict", "trainer.accelerator=cpu")
    model = ("model._target_=tests.engine.plain.PlainModel", data)
    one, four = (train(*model, *read, *words, ranks=ranks) for words, ranks in (((), 0), (("strategy=ddp",), 4)))
    assert len(predictions(four)) == 2
    assert torch.equal(predictions(four), predictions(one))
