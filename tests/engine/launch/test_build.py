"""A run's strategy has the engine's hooks, whoever wrote its class and however the config names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from omegaconf import OmegaConf

from lightswitch.errors import Refused
from lightswitch.hooked_strategy import HookedStrategy
from lightswitch.launch.build import _of_other_kinds, _strategy
from lightswitch.strategies.ddp import DDP, Single
from tests.engine.conftest import PLAIN_DATA, Train
from tests.engine.curves import largest_difference
from tests.engine.plain import SGDModel
from tests.engine.tiny import NO_CHECKPOINTS

_BY_FUNCTION = {"_target_": "lightswitch.strategies.ddp.auto", "accelerator": "cpu", "devices": 2, "num_nodes": 1}


def _named(strategy: dict[str, Any]) -> HookedStrategy:
    return _strategy(OmegaConf.create({"accelerator": "cpu", "devices": 1, "num_nodes": 1, **strategy}))


def test_a_module_of_the_other_lightning_is_refused_with_the_import_to_write() -> None:
    made = type("Mine", (), {"__module__": "pytorch_lightning.core"})()
    cfg = OmegaConf.create({"model": {"_target_": "mine.Mine"}, "mode": "fit"})
    (refused,) = _of_other_kinds(made, None, cfg)
    assert str(refused) == (
        "model._target_=mine.Mine: found a Mine, expected lightning.pytorch's LightningModule, not "
        "pytorch_lightning's; in the file that defines it, write import lightning.pytorch as pl for import "
        "pytorch_lightning as pl"
    )


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ({}, Single),
        ({"strategy": "ddp"}, DDPStrategy),
        ({"strategy": {"_target_": "lightswitch.strategies.ddp.DDP", "bucket_cap_mb": 3}}, DDP),
        ({"strategy": _BY_FUNCTION}, DDP),
    ],
)
def test_a_strategy_is_named_by_its_code_by_lightnings_name_or_not_at_all(
    strategy: dict[str, Any], kind: type[Strategy]
) -> None:
    made = _named(strategy)
    assert isinstance(made, HookedStrategy)
    assert isinstance(made, kind)
    assert type(made).__name__ == kind.__name__


def test_a_name_that_lightning_does_not_know_is_refused() -> None:
    with pytest.raises(Refused, match=r"trainer\.strategy=ddq: there is no such strategy; use strategy=auto"):
        _named({"strategy": "ddq"})


def test_lightnings_own_fsdp_is_refused_where_there_is_no_gpu(train: Train) -> None:
    by_class = ("~trainer.strategy", "+trainer.strategy._target_=lightning.pytorch.strategies.FSDPStrategy")
    run = train(*by_class, "trainer.accelerator=cpu", "trainer.devices=2", check=False)
    assert run.returncode == 2
    told = "error: trainer.strategy: Lightning's FSDPStrategy needs GPUs; use strategy=fsdp, which also supports CPUs"
    assert run.err.splitlines() == [told]


class OwnClipModel(SGDModel):
    """Clips by Lightning's function, to a norm of its own where the Trainer has none."""

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None = None, *_: object, **__: object
    ) -> None:
        if self.global_step == 0:
            print("handed", gradient_clip_val)
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val or 0.05, gradient_clip_algorithm="norm")


OWN_CLIP = ("model._target_=tests.engine.launch.test_build.OwnClipModel", "model.lr=0.5", PLAIN_DATA, *NO_CHECKPOINTS)
OWN_CLIP += ("trainer.max_steps=6", "trainer.log_every_n_steps=1", "global_batch_size=24", "trainer.accelerator=cpu")


def test_a_module_that_clips_itself_is_handed_no_value_that_nobody_typed(train: Train) -> None:
    clipped = (*OWN_CLIP, "trainer=clipped")
    alone = train(*clipped, "strategy=single")
    assert "handed None\n" in alone.out
    assert alone.out.count("clips gradients itself, so trainer.gradient_clip_val=1.0 is ignored; type it to pass") == 1
    for strategy in ("ddp", "fsdp"):
        assert largest_difference(train(*clipped, f"strategy={strategy}", ranks=2), alone) <= 1e-5


def test_a_module_that_clips_itself_is_handed_the_value_that_is_typed(train: Train) -> None:
    run = train(*OWN_CLIP, "strategy=single", "trainer.gradient_clip_val=0.5")
    assert "handed 0.5\n" in run.out
    assert "is ignored" not in run.out
