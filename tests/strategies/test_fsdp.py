"""Sharded training is the run of one process."""

from __future__ import annotations

import pytest

from tests.conftest import Finished, Train, runs_in
from tests.tiny import MODELS, NO_CHECKPOINTS

FSDP = ("strategy=fsdp", "trainer.accelerator=cpu")
SHARDINGS = {
    "FULL_SHARD": (),
    "SHARD_GRAD_OP": ("trainer.strategy.sharding_strategy=SHARD_GRAD_OP",),
    "NO_SHARD": ("trainer.strategy.sharding_strategy=NO_SHARD",),
    "activation checkpointing": ("+trainer.strategy.activation_checkpointing=true",),
}


@pytest.fixture(scope="module", params=MODELS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Finished]:
    train = runs_in(tmp_path_factory.mktemp(request.param))
    return request.param, train(*MODELS[request.param], *NO_CHECKPOINTS, "strategy=single", "trainer.accelerator=cpu")


@pytest.mark.parametrize(("sharding", "ranks"), [("FULL_SHARD", 1), ("FULL_SHARD", 2)])
def test_sharding_keeps_the_losses(sharding: str, ranks: int, alone: tuple[str, Finished], train: Train) -> None:
    model, reference = alone
    sharded = train(*MODELS[model], *NO_CHECKPOINTS, *FSDP, *SHARDINGS[sharding], ranks=ranks)
    for metric in ("train/loss", "val/loss", "test/loss"):
        expected, found = reference.column(metric), sharded.column(metric)
        assert found.keys() == expected.keys()
        delta = max(abs(found[step] - expected[step]) for step in expected)
        print(model, sharding, ranks, metric, delta)
        assert delta <= 1e-5
    print(sharded.out[:1500])
