"""Sharded training is the run of one process, in a part of its memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from lightswitch.preflight.strategies import Request, problems
from tests.engine.conftest import PLAIN_DATA, Finished, Train, runs_in
from tests.engine.curves import largest_difference
from tests.engine.strategies.witness import COMMON, held, tensors
from tests.engine.tiny import MODELS, PICTURES, RECORD
from tests.engine.ways import WAYS

SWITCHES = {  # overrides, ranks, and the part of the model that each rank holds
    "one device": (("strategy=fsdp",), 1, 1.0),
    "FULL_SHARD": (("strategy=fsdp",), 2, 0.5),
    "SHARD_GRAD_OP": (("strategy=fsdp_grad_op",), 2, 0.5),
    "NO_SHARD": (("strategy=fsdp", "trainer.strategy.sharding_strategy=NO_SHARD"), 2, 1.0),
    "HYBRID_SHARD": (("strategy=fsdp_hybrid", "trainer.strategy.shard_size=2", "micro_batch_size=null"), 4, 0.5),
    "activation checkpointing": (("strategy=fsdp", "trainer.strategy.activation_checkpointing=true"), 4, 0.25),
}
CASES = [("language", switch) for switch in SWITCHES] + [("classifier", "FULL_SHARD")]

Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of each kind, once."""
    return cache(runs_in(tmp_path_factory.mktemp("fsdp")))


@pytest.mark.parametrize(("model", "switch"), CASES)
def test_it_is_the_run_of_one_process(model: str, switch: str, run: Run) -> None:
    alone = run(*MODELS[model], *COMMON, "strategy=single")
    overrides, ranks, part = SWITCHES[switch]
    sharded = run(*MODELS[model], *COMMON, *overrides, ranks=ranks)

    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(sharded, alone, metric) <= 1e-5, metric
    assert len(sharded.column("train/loss")) == 50
    assert largest_difference(sharded, alone, "grad_norm") <= 1e-4
    for rank in range(ranks):
        assert tensors(sharded, "start", rank) == tensors(alone, "start", 0)
        elements = held(sharded, rank)
        assert elements["parameters"] == pytest.approx(elements["whole"] * part, rel=0.01)
        assert elements["optimizer"] == pytest.approx(2 * elements["trained"] * part, rel=0.01)


MODULES = (PICTURES, "global_batch_size=24", "trainer.max_steps=6", "trainer.val_check_interval=6")
MODULES += ("trainer.log_every_n_steps=1", *COMMON)


def test_gradients_are_clipped_by_value(run: Run) -> None:
    clipped = ("model._target_=tests.engine.foreign.Encoder", *MODULES, "trainer.gradient_clip_algorithm=value")
    clipped += ("trainer.gradient_clip_val=0.01",)
    alone, sharded = run(*clipped, "strategy=single"), run(*clipped, "strategy=fsdp", ranks=2)
    assert largest_difference(sharded, alone, "train/loss") <= 1e-5


SHORT = ("trainer.max_steps=3", "trainer.val_check_interval=3")


@pytest.mark.parametrize(
    "precision",
    [
        ("precision=bf16-mixed",),
        ("precision=bf16-true", "trainer.strategy.reduce_dtype=float32"),
        ("precision=64-true",),
        ("trainer.strategy.param_dtype=bfloat16", "trainer.strategy.reduce_dtype=float32"),
    ],
    ids=["bf16-mixed", "bf16-true", "64-true", "gathered in bfloat16"],
)
def test_every_precision_trains(precision: tuple[str, ...], run: Run) -> None:
    exact = run(*MODELS["language"], *COMMON, *SHORT, "strategy=single")
    rounded = run(*MODELS["language"], *COMMON, *SHORT, "strategy=fsdp", *precision, ranks=2)
    for step, loss in rounded.column("train/loss").items():
        assert loss == pytest.approx(exact.column("train/loss")[step], abs=0.03)
    kept = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision[0].partition("=")[2], torch.float32)
    assert {tensor.dtype for tensor in torch.load(rounded.run_dir / "end_0.pt").values()} == {kept}


def test_units_can_be_named_and_offloading_on_the_cpu_is_told(train: Train) -> None:
    named = ("strategy=fsdp_offload", "trainer.strategy.units=[Attention,transformer.blocks.*.mlp]", *SHORT)
    sharded = train(*MODELS["language"], *COMMON, *named, ranks=2)
    assert "units      2 Attention, 2 MLP over shard 2" in sharded.out
    assert "cpu_offload does nothing on the CPU" in sharded.out


@pytest.mark.parametrize("way", ["fsdp × 2", "fsdp_tp 2 × 2"])
def test_it_validates_and_predicts_from_its_checkpoint(way: str, train: Train) -> None:
    ranks = WAYS[way].ranks
    switches = (*MODELS["language"], *WAYS[way].switches, "trainer.accelerator=cpu", "run_id=mine")
    checkpoint = "ckpt_path=runs/languagemodel/mine/checkpoints/last.ckpt"
    fitted = train(*switches, *SHORT, ranks=ranks)
    loss = fitted.column("val/loss")[2]
    validated = train(*switches, "mode=validate", checkpoint, ranks=ranks, folder=fitted.folder)
    assert validated.column("val/loss")[2] == pytest.approx(loss, abs=1e-6)
    train(*switches, "mode=predict", checkpoint, ranks=ranks, folder=fitted.folder)
    written = sorted((fitted.run_dir / "predictions").iterdir())
    assert [path.name for path in written] == ["rank_0.pt", "rank_1.pt"]  # a file for each share of the samples


def _request(ranks: int = 4, precision: str = "32-true", **strategy: object) -> Request:
    trainer = {"precision": precision}
    return Request({"_target_": "FSDP", **strategy}, {}, trainer, nodes=2, devices=ranks // 2, accelerator="cuda")


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (_request(shard_size=2), "trainer.strategy.shard_size is HYBRID_SHARD's; use strategy=fsdp_hybrid"),
        (
            _request(sharding_strategy="HYBRID_SHARD", shard_size=3),
            "shard_size=3 does not divide 4 devices; use one of 1, 2, 4",
        ),
        (_request(2, sharding_strategy="HYBRID_SHARD"), "HYBRID_SHARD over one device of each node shards nothing"),
        (_request(param_dtype="bfloat16", precision="bf16-mixed"), "both say what to compute in"),
        (_request(precision="16-mixed"), "does not scale the loss as 16-mixed needs it; use precision=bf16-mixed"),
    ],
    ids=["shard_size", "uneven", "nothing", "two precisions", "16-mixed"],
)
def test_what_it_can_not_do_is_told_before_a_process_is_started(request_: Request, line: str) -> None:
    (problem,) = problems(request_)
    assert line in problem


def test_what_it_can_do_is_not_refused() -> None:
    for precision in ("32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"):
        assert not list(problems(_request(sharding_strategy="HYBRID_SHARD", precision=precision)))


def test_an_average_by_hand_is_told_which_strategies_take_it(train: Train) -> None:
    averaged = ("model._target_=tests.engine.plain.AveragedModel", PLAIN_DATA, "trainer.max_steps=1", "strategy=fsdp")
    failed = train(*averaged, ranks=2, check=False)
    assert failed.returncode == 1
    assert " made by hand does, needs strategy=ddp or deepspeed_stage_2\n" in failed.err.partition("Traceback")[0]


def test_an_average_by_hand_is_that_of_one_process_where_it_is_taken(train: Train) -> None:
    averaged = ("model._target_=tests.engine.plain.AveragedModel", PLAIN_DATA, "trainer.max_steps=3", *RECORD)
    alone, *others = (
        train(*averaged, *switches, ranks=ranks)
        for switches, ranks in ((("strategy=single",), 0), (("strategy=ddp",), 2), (("strategy=deepspeed_stage_2",), 2))
    )
    mean = torch.load(alone.run_dir / "weights_0.pt")["mean"]
    for run in others:
        for rank in range(2):
            torch.testing.assert_close(torch.load(run.run_dir / f"weights_{rank}.pt")["mean"], mean, rtol=0, atol=1e-5)
