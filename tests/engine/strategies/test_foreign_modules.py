"""A module that was written for no strategy trains under each as under ddp, from the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.engine.conftest import Finished, runs_in
from tests.engine.curves import largest_difference
from tests.engine.strategies.witness import WITNESS, held, tensors
from tests.engine.tiny import NO_CHECKPOINTS, PICTURES

RUN = (PICTURES, "global_batch_size=16", "micro_batch_size=4", "trainer.max_steps=6", "trainer.accelerator=cpu")
RUN += ("trainer.val_check_interval=6", "trainer.limit_val_batches=4", "trainer.limit_test_batches=4")
RUN += ("trainer.log_every_n_steps=1",)
RUN += (*NO_CHECKPOINTS, *WITNESS, "~callbacks.progress")
SHARDED = ("fsdp", "fsdp1", "deepspeed_stage_2", "deepspeed_stage_3")
CASES = [(module, strategy) for module in ("Convolutions", "Encoder", "Late") for strategy in SHARDED]
BUILT = [(strategy, ranks) for strategy in ("fsdp", "fsdp1", "deepspeed_stage_3") for ranks in (1, 2, 4)]

Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(module, strategy, ranks=…)`, once of each kind."""
    train = runs_in(tmp_path_factory.mktemp("foreign"))

    @cache
    def run(module: str, strategy: str, ranks: int = 2) -> Finished:
        return train(f"model._target_=tests.engine.foreign.{module}", *RUN, f"strategy={strategy}", ranks=ranks)

    return run


@pytest.mark.parametrize(("module", "strategy"), CASES)
def test_it_trains_as_under_ddp(module: str, strategy: str, run: Run) -> None:
    """Also a batch norm, whose statistics are those of a device's micro batch, and in evaluation rank 0's."""
    replicated, sharded = run(module, "ddp"), run(module, strategy)
    for metric in ("train/loss", "val/loss", "val/accuracy", "test/loss"):
        assert largest_difference(sharded, replicated, metric) <= 1e-5, metric
    assert tensors(sharded, "end", 0) == tensors(sharded, "end", 1)


@pytest.mark.parametrize(("strategy", "ranks"), [*BUILT, ("deepspeed_stage_1", 2)])
def test_what_configure_model_builds_is_built_once_and_the_same_everywhere(strategy: str, ranks: int, run: Run) -> None:
    alone, sharded = run("Late", "single", ranks=0), run("Late", strategy, ranks=ranks)
    for rank in range(ranks):
        assert tensors(sharded, "start", rank) == tensors(alone, "start", 0)
        elements = held(sharded, rank)
        assert elements["whole"] == held(alone, 0)["whole"]  # what is tied stays so
        assert elements["built_on"] == ("meta" if rank and strategy != "deepspeed_stage_1" else "cpu")
    assert largest_difference(sharded, alone, "train/loss") <= 1e-5


def test_the_blocks_of_torchs_transformer_are_the_units(run: Run) -> None:
    assert "units      2 TransformerEncoderLayer over shard 2" in run("Encoder", "fsdp").out
