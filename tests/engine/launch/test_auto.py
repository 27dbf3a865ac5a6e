"""strategy=auto: the simplest strategy whose memory the devices have, decided before a run starts."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from lightswitch.launch import fitting
from lightswitch.planning.device import World
from tests.engine.conftest import PLAIN_DATA, Train
from tests.engine.failures.failing import FAILING_MODEL
from tests.engine.tiny import LANGUAGE_MODEL, NO_CHECKPOINTS, TEXT
from tests.night import at_night

RUN = (
    *(*LANGUAGE_MODEL, TEXT, *NO_CHECKPOINTS, "global_batch_size=16", "trainer.max_steps=2", "trainer.devices=2"),
    *("trainer.limit_val_batches=0", "trainer.limit_test_batches=1"),
)


def decision(out: str) -> str:
    (line,) = (line for line in out.splitlines() if line.startswith("auto "))
    return line.removeprefix("auto").strip()


@pytest.mark.nightly
def test_where_replicas_do_not_fit_ranks_shard_and_each_decides_the_same(train: Train) -> None:
    """States of the whole model are 0.52 MiB, and so is each process's half of the memory, less what samples take."""
    run = train(*RUN, "plan.memory_gib=0.0015", ranks=2)
    assert decision(run.out).startswith("fsdp_grad_op, micro batch 1: ")
    assert "strategy   FSDP, " in run.out
    assert "batch      16 samples a step = 1 × 2 devices × accumulation 8" in run.out
    assert "sharding_strategy: SHARD_GRAD_OP" in (run.run_dir / "config.yaml").read_text()


@pytest.mark.nightly
def test_what_is_small_is_not_simulated_and_what_fits_nowhere_is_refused(train: Train) -> None:
    small = train(*RUN, "plan.device=h100", ranks=2)
    assert decision(small.out) == "single or ddp: states are 0.518 MiB of 78.8 GiB on H100"
    assert "strategy   DDP, " in small.out
    refused = train(*RUN, "plan.memory_gib=0.001", check=False)
    assert refused.returncode == 2
    (line,) = refused.err.strip().splitlines()
    assert line.startswith("error: strategy=auto: no strategy fits; the smallest is fsdp, recomputing, micro batch 1: ")
    assert "; use at least 3 devices, or devices of " in line


@pytest.mark.nightly
def test_micro_batch_size_auto_is_the_largest_that_fits(train: Train) -> None:
    run = train(*RUN, "strategy=fsdp", "micro_batch_size=auto", "plan.memory_gib=0.0018", ranks=2)
    assert decision(run.out).startswith("fsdp, micro batch 2: ")
    assert "batch      16 samples a step = 2 × 2 devices × accumulation 4" in run.out
    assert "micro_batch_size: 2\n" in (run.run_dir / "config.yaml").read_text()


def test_strategies_that_a_fork_has_removed_are_not_needed() -> None:
    """The strategy that a run is under follows from its config, whatever files are in conf/strategy."""
    cfg = OmegaConf.create({"trainer": {"strategy": {"_target_": "lightswitch.strategies.ddp.auto"}}})
    run: Any = None  # whose words are not asked for
    under = [fitting._run_under(cfg, run, world) for world in (World(1, 1), World(4, 1))]
    assert [(one.name, one.is_replicated) for one in under] == [("single", True), ("ddp", True)]


# Where memory has run out

RAISING = (
    *(FAILING_MODEL, PLAIN_DATA, "run_id=mine"),
    *("model.how='lacks device memory'", "model.where='training_step 0'", "model.rank=null"),
)


@pytest.mark.parametrize("ranks", [2, *at_night(0)])
def test_a_smaller_micro_batch_is_the_first_thing_to_try(ranks: int, train: Train) -> None:
    failed = train(*RAISING, "global_batch_size=32", "strategy=ddp", ranks=ranks, check=False)
    assert failed.returncode == 1
    (line,) = (line for line in failed.err.splitlines() if line.startswith("next: "))
    assert line.startswith(f"next: type micro_batch_size={8 if ranks else 16}; what fits is computed by python ")
    planned = f"mode=plan strategy=auto trainer.num_nodes=1 trainer.devices={ranks or 1}"
    assert line.endswith(f" global_batch_size=32 {planned}")


# More of strategy=auto and micro_batch_size=auto


@pytest.mark.nightly
def test_ranks_that_a_run_starts_are_told_what_it_has_decided(train: Train) -> None:
    run = train(*RUN, "plan.memory_gib=0.003")
    assert decision(run.out).startswith("ddp, micro batch 2: ")
    assert "batch      16 samples a step = 2 × 2 devices × accumulation 4" in run.out


@pytest.mark.nightly
def test_micro_batch_size_auto_is_the_whole_share_where_that_fits(train: Train) -> None:
    run = train(*RUN, "trainer.devices=1", "micro_batch_size=auto")
    assert decision(run.out).startswith("single, micro batch 16: ")
    assert "batch      16 samples a step = 16 × 1 device × accumulation 1" in run.out


@pytest.mark.nightly
def test_micro_batch_size_auto_is_refused_where_not_a_sample_fits(train: Train) -> None:
    refused = train(*RUN, "strategy=ddp", "micro_batch_size=auto", "plan.memory_gib=0.001", check=False)
    assert refused.returncode == 2
    (line,) = refused.err.strip().splitlines()
    assert line.startswith("error: micro_batch_size=auto: no strategy fits; the smallest is ddp, micro batch 8: ")
    assert "; use devices of " in line
