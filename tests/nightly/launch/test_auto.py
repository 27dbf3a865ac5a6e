"""More of strategy=auto and micro_batch_size=auto."""

from __future__ import annotations

from tests.engine.conftest import Train
from tests.engine.launch.test_auto import RUN, SIMULATED, decision
from tests.engine.tiny import NO_CHECKPOINTS


@SIMULATED
def test_ranks_that_a_run_starts_are_told_what_it_has_decided(train: Train) -> None:
    run = train(*RUN, "plan.memory_gib=0.003")
    assert decision(run.out).startswith("ddp, micro batch 2: ")
    assert "batch      16 samples a step = 2 × 2 devices × accumulation 4" in run.out


def test_micro_batch_size_auto_is_the_whole_share_where_that_fits(train: Train) -> None:
    run = train(*RUN, "trainer.devices=1", "micro_batch_size=auto")
    assert decision(run.out).startswith("single, micro batch 16: ")
    assert "batch      16 samples a step = 16 × 1 device × accumulation 1" in run.out


@SIMULATED
def test_micro_batch_size_auto_is_refused_where_not_a_sample_fits(train: Train) -> None:
    refused = train(*RUN, "strategy=ddp", "micro_batch_size=auto", "plan.memory_gib=0.0005", check=False)
    assert refused.returncode == 2
    (line,) = refused.err.strip().splitlines()
    assert line.startswith("error: micro_batch_size=auto: no strategy fits; the smallest is ddp, micro batch 8: ")


def test_an_evaluation_shards_only_where_parameters_are_many(train: Train) -> None:
    """0.13 MiB of parameters, and of the memory, half is each process's."""
    trained = train(*(word for word in RUN if word not in NO_CHECKPOINTS), "strategy=ddp", ranks=2)
    (checkpoint,) = trained.run_dir.glob("checkpoints/step_2.ckpt")
    for gib, strategy in ((1, "DDP"), (0.0002, "FSDP")):
        run = train(*RUN, "mode=test", f"ckpt_path={checkpoint}", f"plan.memory_gib={gib}", ranks=2)
        assert f"strategy   {strategy}, " in run.out
