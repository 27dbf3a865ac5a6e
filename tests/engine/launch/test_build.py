"""A run's strategy has the engine's hooks, whoever wrote its class and however the config names it."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, Strategy
from omegaconf import OmegaConf

from lightswitch.errors import Refused
from lightswitch.hooked_strategy import HookedStrategy
from lightswitch.launch.build import _strategy
from lightswitch.strategies.ddp import DDP
from lightswitch.strategies.single import Single
from tests.engine.conftest import Train

_BY_FUNCTION = {"_target_": "lightswitch.strategies.auto.auto", "accelerator": "cpu", "devices": 2, "num_nodes": 1}


def _named(strategy: dict[str, Any]) -> HookedStrategy:
    return _strategy(OmegaConf.create({"accelerator": "cpu", "devices": 1, "num_nodes": 1, **strategy}))


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
    told = "error: trainer.strategy: Lightning's FSDPStrategy takes GPUs alone; use strategy=fsdp, which takes CPUs too"
    assert run.err.splitlines() == [told]
