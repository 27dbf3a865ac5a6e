"""A module that was written for no strategy trains under each as under ddp, from the weights of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine import foreign
from tests.engine.fits import Fit, Fits
from tests.engine.models.pictures import Pictures
from tests.engine.strategies.witness import to_the_bit
from tests.night import at_night
from tests.runs import largest_difference

pytest.importorskip("deepspeed")

MODULES = {
    name: Fit(getattr(foreign, name), Pictures, global_batch=16, micro_batch=4)
    for name in ("Convolutions", "Encoder", "Late")
}
AS_UNDER_DDP = [
    *(("Convolutions", "fsdp"), ("Encoder", "fsdp"), ("Encoder", "deepspeed_stage_2")),
    *at_night(("Late", "fsdp"), ("Late", "deepspeed_stage_3"), ("Convolutions", "deepspeed_stage_3")),
]
BUILT = [("fsdp", 2), *at_night(("fsdp", 1), ("fsdp", 4), ("deepspeed_stage_3", 1), ("deepspeed_stage_3", 4))]


@pytest.mark.nightly
@pytest.mark.parametrize(("module", "strategy"), AS_UNDER_DDP)
def test_it_trains_as_under_ddp(module: str, strategy: str, fits: Fits) -> None:
    """Also a batch norm, whose statistics are those of a device's micro batch, and in evaluation rank 0's."""
    replicated, sharded = (fits(replace(MODULES[module], strategy=name), 2) for name in ("ddp", strategy))
    for metric in ("train/loss", "val/loss", "val/accuracy", "test/loss"):
        assert largest_difference(sharded[0], replicated[0], metric) <= 1e-5, metric
    assert to_the_bit(sharded[0].end) == to_the_bit(sharded[1].end)
    is_cut_by_blocks = "units      2 TransformerEncoderLayer over shard 2" in sharded[0].told
    assert is_cut_by_blocks == ((module, strategy) == ("Encoder", "fsdp"))


@pytest.mark.parametrize(("strategy", "ranks"), [*BUILT, *at_night(("deepspeed_stage_1", 2))])
def test_what_configure_model_builds_is_built_once_and_the_same_everywhere(
    strategy: str, ranks: int, fits: Fits
) -> None:
    (alone,) = fits(MODULES["Late"])
    sharded = fits(replace(MODULES["Late"], strategy=strategy), ranks)
    for number, rank in enumerate(sharded):
        assert to_the_bit(rank.start) == to_the_bit(alone.start)
        assert rank.held["whole"] == alone.held["whole"]  # what is tied stays so
        assert rank.held["built_on"] == ("meta" if number and strategy != "deepspeed_stage_1" else "cpu")
    assert largest_difference(sharded[0], alone) <= 1e-5
