"""One device: the strategy that is not distributed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from lightning.pytorch.strategies import Strategy

from lightswitch.strategies.ddp import Single, auto


class Numbered(CPUAccelerator):
    """CPUs that are chosen by their number, as GPUs are."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu", number) for number in devices]


@pytest.fixture
def numbered() -> Iterator[str]:
    AcceleratorRegistry.register("numbered", Numbered)
    yield "numbered"
    AcceleratorRegistry.remove("numbered")


def _trainer(strategy: Strategy, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(strategy=strategy, logger=False, enable_checkpointing=False, **arguments)


def test_single_is_one_process_on_the_cpu() -> None:
    trainer = _trainer(Single(), accelerator="cpu", devices=1)
    assert trainer.strategy.root_device == torch.device("cpu")
    assert (trainer.world_size, trainer.strategy.launcher) == (1, None)


def test_single_takes_the_device_that_is_named(numbered: str) -> None:
    assert _trainer(Single(), accelerator=numbered, devices=[2]).strategy.root_device == torch.device("cpu", 2)


def test_auto_takes_the_device_that_is_named(numbered: str) -> None:
    trainer = _trainer(auto(numbered, [2], 1), accelerator=numbered, devices=[2])
    assert (type(trainer.strategy), trainer.strategy.root_device) == (Single, torch.device("cpu", 2))


@pytest.mark.gpu
def test_single_follows_the_accelerator() -> None:
    assert _trainer(Single(), devices=1).strategy.root_device == torch.device("cuda:0")


@pytest.mark.gpu(2)
def test_single_takes_the_gpu_that_is_named() -> None:
    assert _trainer(Single(), devices=[1]).strategy.root_device == torch.device("cuda:1")
