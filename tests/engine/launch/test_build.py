"""A run's strategy has the engine's hooks, whoever wrote its class and however the config names it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import Strategy
from omegaconf import OmegaConf

from lightswitch.errors import Refused
from lightswitch.hooked_strategy import HookedStrategy
from lightswitch.launch.build import _of_other_kinds, _strategy, plugins
from lightswitch.strategies.ddp import DDP, Single
from lightswitch.strategies.fsdp import FSDP
from tests.engine.fits import Fit, trained
from tests.engine.modules import walk
from tests.engine.plain import PlainData, PlainModel
from tests.night import at_night
from tests.pool import Pool, RankFailed

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
        ({"strategy": {"_target_": "lightswitch.strategies.ddp.DDP", "bucket_cap_mb": 3}}, DDP),
        ({"strategy": _BY_FUNCTION}, DDP),
    ],
)
def test_a_strategy_is_named_by_its_code_or_not_at_all(strategy: dict[str, Any], kind: type[Strategy]) -> None:
    made = _named(strategy)
    assert isinstance(made, HookedStrategy)
    assert isinstance(made, kind)
    assert type(made).__name__ == kind.__name__


def test_a_name_in_place_of_a_class_is_refused() -> None:
    with pytest.raises(Refused, match=r"trainer\.strategy=ddp: it names no class; type strategy=ddp, or "):
        _named({"strategy": "ddp"})


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled, but CUDA is not available")
@pytest.mark.parametrize(("strategy", "kind"), [(FSDP(), MixedPrecision), (DDP(), None)])
def test_lightning_is_handed_16_mixed_as_a_plugin_where_it_refuses_the_name(
    strategy: Strategy, kind: type[MixedPrecision] | None
) -> None:
    handed = plugins(OmegaConf.create({"trainer": {"precision": "16-mixed"}}), None, [], strategy)["plugins"]
    if kind is None:
        assert handed is None
        return
    (plugin,) = handed
    assert isinstance(plugin, kind)
    assert isinstance(plugin.scaler, torch.amp.GradScaler)


# What a strategy can't do with a module


class ReturnsNone(PlainModel):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", ["ddp", *at_night("deepspeed_stage_2")])
def test_a_step_without_a_loss_is_a_line(strategy: str, pool: Pool) -> None:
    with pytest.raises(RankFailed) as failed:
        pool(2)(trained, Fit(ReturnsNone, partial(PlainData, 48), strategy, global_batch=8, steps=2))
    assert str(failed.value.error).startswith(
        "ReturnsNone.training_step returns None in automatic optimization, but all devices have to train on each "
        "batch; return a loss (to skip a batch, 0 times its loss), or set self.automatic_optimization = False if it "
    )


class Raises(PlainModel):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        raise RuntimeError("of my own")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way", "line"),
    [
        ("GradientPenalty", "fsdp", "GradientPenalty differentiates a gradient (create_graph=True), which needs each "),
        *at_night(
            ("Snapshot", "fsdp", "Snapshot fails in its first steps under FSDP, which shards parameters over devices"),
            ("ForceField", "ZeRO 3", "ForceField fails in its first steps under DeepSpeed, which "),
        ),
    ],
)
def test_what_a_strategy_cannot_do_is_a_line(name: str, way: str, line: str, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failed:
        pool(2)(walk.trained, name, way, tmp_path, None)
    assert isinstance(failed.value.error, Refused)
    assert str(failed.value.error).startswith(line)
    assert "\n" not in str(failed.value.error)


@pytest.mark.parametrize("strategy", ["fsdp", *at_night("deepspeed_stage_3")])
def test_what_a_module_raises_on_purpose_is_its_own(strategy: str, pool: Pool) -> None:
    with pytest.raises(RankFailed) as failed:
        pool(2)(trained, Fit(Raises, partial(PlainData, 48), strategy, global_batch=8, micro_batch=4, steps=2))
    assert type(failed.value.error) is RuntimeError
