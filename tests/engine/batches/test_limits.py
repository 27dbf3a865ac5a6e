"""A limit of an evaluation is so many batches of the loader, on any number of devices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from tests.engine.batches.streams import SizedStream, Stream
from tests.engine.fits import PLAIN, Fit, Fits
from tests.engine.plain import Buckets, PlainData, PlainModel, Points


class Sets(PlainData):
    """Validates on loaders of each kind, each of five batches."""

    def val_dataloader(self) -> list[DataLoader]:
        points = Points(40)
        return [
            DataLoader(points, 8),
            DataLoader(SizedStream(points), 8),
            DataLoader(points, batch_sampler=Buckets([1.0] * 40, 8.0)),
            DataLoader([points[:8]] * 5, batch_size=None),  # runs unchanged: each rank reads it
        ]


class Unsized(PlainData):
    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(Stream(Points(40)), 8), DataLoader(Stream(Points(12)), 8)]


class Reading(PlainModel):
    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/samples", float(len(batch[1])), reduce_fx="sum")
        self.log("val/sum", batch[0].double().sum(), reduce_fx="sum")


LIMITED = replace(PLAIN, module=Reading, data=Sets, steps=2)


def _read(fits: Fits, fit: Fit, ranks: int, name: str = "val/samples") -> list[float]:
    """Return what all ranks together have read of each loader in a validation."""
    run = fits(replace(fit, strategy="ddp" if ranks > 1 else "single"), ranks)[0]
    return [of[max(of)] for key, of in sorted(run.columns.items()) if key.startswith(name)]


@pytest.mark.parametrize("limit", [2, 0.4])
def test_all_devices_together_read_so_many_of_a_loaders_batches(limit: float, fits: Fits) -> None:
    limited = replace(LIMITED, arguments=f"limit_val_batches={limit}")
    for ranks in (1, 3):
        assert _read(fits, limited, ranks) == [16, 16, 16, ranks * 16]
        assert _read(fits, limited, ranks, "val/sum")[:3] == pytest.approx(_read(fits, limited, 1, "val/sum")[:3])


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_stream_of_unknown_length_is_left_after_so_many(ranks: int, fits: Fits) -> None:
    assert _read(fits, replace(LIMITED, data=Unsized, arguments="limit_val_batches=2"), ranks) == [16, 12]


@pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_that_overfit_are_as_many_of_a_validation(ranks: int, fits: Fits) -> None:
    accumulation = 4 // ranks  # of micro batches, in which a Trainer has what its user counts in steps
    overfit = replace(LIMITED, data=partial(PlainData, batch_size=8), arguments=f"overfit_batches={accumulation}")
    assert _read(fits, overfit, ranks) == [8]
