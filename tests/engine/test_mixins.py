"""A method of the engine's before those of a class that is known once there is an object of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor

from lightswitch.hooked_strategy import HookedStrategy, Mixin, hooked, with_mixin
from lightswitch.strategies.ddp import Single


class _Doubled(Mixin, Precision):
    def convert_input(self, data: Any) -> Any:
        return 2 * super().convert_input(data)


class _Incremented(Mixin, Precision):
    def convert_input(self, data: Any) -> Any:
        return 1 + super().convert_input(data)


def test_a_method_comes_before_the_class_s_own_and_the_class_keeps_its_name() -> None:
    plugin = MixedPrecision("bf16-mixed", "cpu")
    mixed = with_mixin(_Doubled, plugin)
    assert (mixed.convert_input(3), plugin.convert_input(3)) == (6, 3)
    assert isinstance(mixed, MixedPrecision)
    assert (type(mixed).__qualname__, type(mixed).__module__) == ("MixedPrecision", MixedPrecision.__module__)
    assert mixed.device == "cpu"


def test_mixins_add_up_and_each_is_there_once() -> None:
    mixed = with_mixin(_Incremented, with_mixin(_Doubled, Precision()))
    assert mixed.convert_input(3) == 7
    assert with_mixin(_Doubled, mixed) is mixed


class _Halving(DDPStrategy):
    """Of someone who makes two processes of one."""

    world_size = 2

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:  # type: ignore[override]
        return tensor / 2 if reduce_op == "mean" else tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.met = args


@pytest.mark.parametrize("make", [Single, DDPStrategy, _Halving])
def test_any_strategy_hands_its_loaders_to_be_shared(make: type[Strategy]) -> None:
    trainer = Trainer(strategy=hooked(make()), accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    strategy = HookedStrategy.of(trainer)
    assert isinstance(strategy, make)
    assert strategy.process_dataloader([1, 2]) == [1, 2]
    strategy.share = lambda loader: [loader]
    assert strategy.process_dataloader([1, 2]) == [[1, 2]]


def test_ranks_meet_after_a_save_of_a_strategy_that_has_its_own() -> None:
    strategy: Any = hooked(_Halving())
    strategy.barrier("Trainer.save_checkpoint")
    assert strategy.met == ("Trainer.save_checkpoint",)


def test_a_mean_of_whole_numbers_is_no_whole_number() -> None:
    strategy = hooked(_Halving())
    assert strategy.reduce(torch.tensor(37)) == 18.5
    assert strategy.reduce(torch.tensor(37), reduce_op="sum").dtype == torch.int64


def test_weights_are_drawn_on_the_cpu_and_by_a_strategy_s_own_way_where_it_has_one() -> None:
    strategy, sharded = hooked(Single()), hooked(_Drawing())
    Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    strategy.parallel_devices = [torch.device("meta")]  # type: ignore[attr-defined]  # of Single
    with strategy.tensor_init_context():
        assert torch.zeros(1).device.type == "cpu"
    with sharded.tensor_init_context():
        assert torch.zeros(1).device.type == "meta"


class _Drawing(DDPStrategy):
    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        return torch.device("meta")
