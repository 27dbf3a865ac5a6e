"""What several ranks evaluate together counts each sample once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from tests.engine.fits import Fit, Fits
from tests.engine.plain import Buckets, PlainData, PlainModel, Points
from tests.night import at_night


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


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 4), *at_night(("ddp", 2), ("fsdp", 2))])
def test_ranks_gather_metrics_whose_entries_differ_in_number(strategy: str, ranks: int, fits: Fits) -> None:
    one = Fit(LogsEntries, ElevenData, steps=1)
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


class SeriesData(LightningDataModule):
    """Batches without a dimension of samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Series(16), batch_size=8, shuffle=True, collate_fn=list)

    def val_dataloader(self) -> DataLoader:
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


@pytest.mark.parametrize("how", ["in order", "formed"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_batch_weighs_its_samples_whatever_the_shape_of_its_tensors(how: str, ranks: int, fits: Fits) -> None:
    strategy = "ddp" if ranks > 1 else "single"
    series = Fit(OverSeries, partial(SeriesData, how), strategy, global_batch=11, micro_batch=None, steps=2)
    run = fits(series, ranks)[0]
    assert [*run.column("train/value").values()] == pytest.approx([7.5])
    assert [*run.column("val/value").values()] == pytest.approx([4.5])
    rows = torch.cat(Series(10).series)
    assert [*run.column("val/of_rows").values()] == pytest.approx([float(rows.mean())])
