"""A global batch that does not divide over the devices trains the run of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.engine.batches.test_items import WHOLE, Tagger
from tests.engine.curves import largest_difference
from tests.engine.fits import CLASSIFIER, PLAIN, TENSOR_PARALLEL, Fits
from tests.engine.fits import LANGUAGE as TEXTS
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


@pytest.mark.parametrize(("limit", "ranks", "lines"), [(2, 1, 0), (2, 3, 1), (1.0, 3, 0)])
def test_a_limit_of_an_evaluation_counts_the_batches_of_a_device_and_says_so(
    limit: float, ranks: int, lines: int, fits: Fits
) -> None:
    limited = replace(PLAIN, global_batch=192, micro_batch=None, arguments=f"limit_val_batches={limit}", steps=2)
    limited = replace(limited, strategy="ddp" if ranks > 1 else "single")
    told = fits(limited, ranks)[0].told
    assert told.count(f"limit      trainer.limit_val_batches={limit} counts the batches of each device") == lines
