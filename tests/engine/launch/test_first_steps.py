"""What a strategy can't do with a module is told in a line, in its first steps; a module's own error stays its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from lightswitch.errors import Refused
from tests.engine.fits import Fit, trained
from tests.engine.modules import walk
from tests.engine.plain import PlainData, PlainModel
from tests.pool import Pool, RankFailed

NONE = (
    "StepsByHand.training_step returns None in automatic optimization, but all devices have to train on each batch; "
    "return a loss (to skip a batch, 0 times its loss), or set self.automatic_optimization = False if it steps manually"
)


class Raises(PlainModel):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        raise RuntimeError("of my own")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way", "line"),
    [
        ("StepsByHand", "ddp", NONE),
        ("StepsByHand", "ZeRO 2", NONE),
        (
            "GradientPenalty",
            "fsdp",
            "GradientPenalty differentiates a gradient (create_graph=True), which needs each ",
        ),
        ("Snapshot", "fsdp", "Snapshot fails in its first steps under FSDP, which shards parameters over devices"),
        ("PhysicsInformed", "ZeRO 3", "PhysicsInformed fails in its first steps under DeepSpeed, which "),
    ],
)
def test_what_a_strategy_cannot_do_is_a_line(name: str, way: str, line: str, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        pool(2)(walk.trained, name, way, tmp_path, None)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith(line)
    assert "\n" not in str(failed.value.error)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3"])
def test_what_a_module_raises_on_purpose_is_its_own(strategy: str, pool: Pool) -> None:
    with pytest.raises(RankFailed) as failed:
        pool(2)(trained, Fit(Raises, partial(PlainData, 48), strategy, global_batch=8, micro_batch=4, steps=2))
    assert type(failed.value.error) is RuntimeError
