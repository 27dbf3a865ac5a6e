"""Ranks begin with rank 0's values, and what differs later is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric

from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.errors import Refused
from lightswitch.strategies.agreement import broadcast_metric_states, broadcast_weights, differing
from tests.engine import foreign
from tests.engine.fits import PLAIN, Fit, Fits, trained
from tests.engine.models.pictures import Pictures
from tests.engine.plain import NormedModel, PlainModel
from tests.engine.strategies.witness import to_the_bit
from tests.night import at_night
from tests.pool import Pool, RankFailed
from tests.runs import largest_difference

# Replicas that differ are found in the first steps and at each save; the run ends before what it saves counts.


def _found() -> dict[str, list[int]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = torch.arange(6.0) + (rank == 2)
    copies, shards = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")), [Replicate(), Shard(0)]
    tensors = {
        "equal": torch.tensor([1.0, torch.nan, 3.0]),
        "rounded": torch.tensor([1.0, 2.0]) * (1 + rank * 1e-7),
        "flag": torch.tensor(rank < 3),
        "complex": torch.tensor([1.0 + 1j * (rank == 1)]),
        "whole": own,
        "empty": torch.empty(0),
        "mirrored": torch.tensor([0.3, -0.3]) + 1e-3 * (rank == 3),
        "far apart": torch.arange(2**20 + 9).roll(2**20 * (rank == 1)),
        "sharded": DTensor.from_local(own, copies["shards"], [Shard(0)]),
        "copied": DTensor.from_local(own, copies, shards),
        "same copies": DTensor.from_local(torch.full((3,), float(rank % 2)), copies, shards),
    }
    return differing(tensors, torch.device("cpu"))


def test_differences_beyond_rounding_are_found_with_their_ranks(pool: Pool) -> None:
    expected = {"flag": [3], "complex": [1], "mirrored": [3], "whole": [2], "far apart": [1], "copied": [2]}
    assert pool(4)(_found) == [expected] * 4


class DriftsByRank(PlainModel):
    """Changes a weight on each rank by itself, from a step on."""

    def __init__(self, step: int = 1) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step >= self.step:
            with torch.no_grad():
                self.net[3].bias.add_(1e-3 * self.global_rank)


class CountsByRank(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen = self.seen + batch[0].sum(0)
        return super().training_step(batch, batch_idx)


FIT = replace(PLAIN, strategy="ddp", agrees=True, micro_batch=None)


def test_a_parameter_that_ranks_change_by_themselves_ends_the_run(pool: Pool) -> None:
    with pytest.raises(RankFailed) as failed:
        pool(2)(trained, replace(FIT, module=DriftsByRank))
    assert isinstance(failed.value.error, Refused)
    assert "net.3.bias of rank 1 differs from rank 0 after step 1" in str(failed.value.error)


def test_it_ends_before_it_is_saved(pool: Pool, tmp_path: Path) -> None:
    saves = partial(LastCheckpoints, str(tmp_path), 2, keep=9)
    fit = replace(FIT, module=partial(DriftsByRank, 6), steps=9, agrees=True)
    with pytest.raises(RankFailed) as failed:
        pool(2)(_fitted, fit, saves)
    assert isinstance(failed.value.error, Refused)
    assert {path.name for path in tmp_path.glob("step_*.ckpt")} == {"step_2.ckpt", "step_4.ckpt"}


def _fitted(fit: Any, saves: Any) -> None:
    trainer = fit.trainer(saves())
    trainer.fit(fit.module(), fit.data())


def test_a_buffer_is_named_once_and_statistics_of_batch_norms_are_not(pool: Pool) -> None:
    told = pool(2)(trained, replace(FIT, module=CountsByRank))[0].told
    assert told.count("buffers    seen differs between ranks") == 1
    assert "differs between ranks" not in pool(2)(trained, replace(FIT, module=NormedModel))[0].told


@pytest.mark.parametrize("strategy", at_night("ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3"))
def test_equal_replicas_are_not_told_of(strategy: str, pool: Pool) -> None:
    outcomes = pool(2)(trained, replace(FIT, strategy=strategy))
    assert not any("differs between ranks" in one.told for one in outcomes)


# Rank 0's values take the place of each rank's own


CPU = torch.device("cpu")


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_ties_kinds_and_values_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.register_buffer("scale", torch.tensor([2.0, 3.0]), persistent=False)
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}

    broadcast_weights(model.modules(), CPU, done=set())

    assert model[1].weight is model[0].weight
    assert not model[0].bias.requires_grad
    assert "scale" not in model.state_dict()
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.usefixtures("one_process")
def test_a_module_that_has_its_values_keeps_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    done: set[nn.Module] = set()
    broadcast_weights(model[0].modules(), CPU, done)
    first, second = model[0].weight, model[1].weight
    broadcast_weights(model.modules(), CPU, done)
    assert model[0].weight is first
    assert model[1].weight is not second


@pytest.mark.usefixtures("one_process")
def test_tensors_with_strides_of_their_own_are_laid_out_plainly() -> None:
    convolution = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    expected = convolution.weight.detach().clone()
    broadcast_weights(convolution.modules(), CPU, done=set())
    assert convolution.weight.is_contiguous()  # as fully_shard wants it
    assert torch.equal(convolution.weight, expected)


@pytest.mark.usefixtures("one_process")
def test_states_of_metrics() -> None:
    model = nn.ModuleDict({"loss": MeanMetric()})
    model["loss"].update(3.0)
    broadcast_metric_states(model, CPU)
    assert model["loss"].compute() == 3.0


LATE = Fit(foreign.Late, Pictures, global_batch=16, micro_batch=4)
BUILT = [("fsdp", 2), *at_night(("fsdp", 1), ("fsdp", 4), *((f"deepspeed_stage_{n}", 2) for n in (1, 3)))]


@pytest.mark.parametrize(("strategy", "ranks"), BUILT)
def test_what_configure_model_builds_is_built_once_and_the_same_everywhere(
    strategy: str, ranks: int, fits: Fits
) -> None:
    (alone,) = fits(LATE)
    sharded = fits(replace(LATE, strategy=strategy), ranks)
    for number, rank in enumerate(sharded):
        assert to_the_bit(rank.start) == to_the_bit(alone.start)
        assert rank.held["whole"] == alone.held["whole"]  # what is tied stays so
        assert rank.held["built_on"] == ("meta" if number and strategy != "deepspeed_stage_1" else "cpu")
    assert largest_difference(sharded[0], alone) <= 1e-5
