"""fit, validate, test and predict with the best checkpoint, under each strategy."""

from __future__ import annotations

import pytest
import torch

from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.curves import predictions
from tests.engine.tiny import LANGUAGE
from tests.engine.ways import WAYS

RUN = (*LANGUAGE, "micro_batch_size=6")
FIT = ("run_id=mine", "trainer.max_steps=16", "trainer.val_check_interval=8")
SHARED = ("ddp × 2", "fsdp × 2", "fsdp1 × 2", "deepspeed_stage_2 × 2", "deepspeed_stage_3 × 2", "fsdp_tp 2 × 2")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("alone"))(*RUN, *FIT, "strategy=single")


@pytest.mark.parametrize("way", SHARED)
def test_fit_tests_the_best(way: str, alone: Finished, train: Train) -> None:
    shared = train(*RUN, *FIT, *WAYS[way].switches, ranks=WAYS[way].ranks)
    assert shared.column("test/loss") == pytest.approx(alone.column("test/loss"), abs=1e-4)


@pytest.fixture(scope="module")
def predicted(alone: Finished, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    train = runs_in(tmp_path_factory.mktemp("predicted"))
    return predictions(train(*_reads(alone), "mode=predict", "strategy=single"))


@pytest.mark.parametrize("way", SHARED)
def test_it_is_validated_and_predicted_from(way: str, alone: Finished, predicted: torch.Tensor, train: Train) -> None:
    switches, ranks = WAYS[way].switches, WAYS[way].ranks
    validated = train(*_reads(alone), "mode=validate", *switches, ranks=ranks).column("val/loss")
    (step,) = validated
    assert validated[step] == pytest.approx(alone.column("val/loss")[step - 1], abs=1e-5)
    found = predictions(train(*_reads(alone), "mode=predict", *switches, ranks=ranks))
    assert torch.allclose(found, predicted, atol=1e-3)


def _reads(alone: Finished) -> tuple[str, ...]:
    return (*RUN, f"ckpt_path={alone.run_dir}/checkpoints/best.ckpt")
