"""A global batch that does not divide over the devices trains the run of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from tests.engine.batches.streams import SizedStream, Stream
from tests.engine.batches.test_items import WHOLE, Tagger
from tests.engine.curves import largest_difference
from tests.engine.fits import CLASSIFIER, PLAIN, TENSOR_PARALLEL, Fit, Fits
from tests.engine.fits import LANGUAGE as TEXTS
from tests.engine.plain import Buckets, PlainData, PlainModel, Points
from tests.night import at_night

LANGUAGE = replace(TEXTS, global_batch=16, micro_batch=None)
STRATEGIES = ("ddp", "fsdp", *(f"deepspeed_stage_{stage}" for stage in (1, 2, 3)))


@pytest.mark.parametrize(
    ("strategy", "global_batch", "micro_batch"),
    [
        *(("ddp", 2, None), ("fsdp", 10, 3)),
        *at_night(("deepspeed_stage_3", 16, None)),
        *at_night(*((strategy, 16, None) for strategy in STRATEGIES[:-1])),
        *at_night(*((strategy, *cut) for strategy in STRATEGIES[1:] for cut in ((10, 4), (2, None), (10, 3))))[:-1],
    ],
)
def test_three_devices_train_the_run_of_one(
    strategy: str, global_batch: int, micro_batch: int | None, fits: Fits
) -> None:
    whole = replace(LANGUAGE, global_batch=global_batch)
    (one,) = fits(whole)
    cut = replace(whole, strategy=strategy, micro_batch=micro_batch)
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(fits(cut, 3)[0], one, metric) <= 1e-5, metric


@pytest.mark.nightly
def test_a_micro_batch_that_does_not_divide_is_the_most_that_a_device_takes(fits: Fits) -> None:
    for fit in (LANGUAGE, replace(CLASSIFIER, global_batch=16, micro_batch=None)):
        (one,), (cut,) = fits(fit), fits(replace(fit, micro_batch=5))
        assert largest_difference(cut, one) <= 1e-5


@pytest.mark.nightly
def test_tensor_parallel_groups_take_slices_of_two_sizes(fits: Fits) -> None:
    odd = replace(LANGUAGE, global_batch=15)
    assert largest_difference(fits(replace(odd, strategy=TENSOR_PARALLEL), 4)[0], fits(odd)[0]) <= 1e-5


@pytest.mark.nightly
def test_a_mean_over_tokens_is_that_of_all_devices(fits: Fits) -> None:
    whole = replace(WHOLE, module=partial(Tagger), global_batch=16)
    for strategy in ("ddp", "fsdp"):
        assert largest_difference(fits(replace(whole, strategy=strategy), 3)[0], fits(whole)[0]) <= 1e-5


# A limit of an evaluation is so many batches of the loader, on any number of devices


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
