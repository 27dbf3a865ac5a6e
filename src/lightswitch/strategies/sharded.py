"""What FSDP's two generations share: for modules that know nothing of it, and are built once, by rank 0."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightswitch import patches
from lightswitch.errors import Refused
from lightswitch.strategies.initial_weights import left_on_meta
from lightswitch.strategies.rank_0 import share
from lightswitch.strategies.replicated import average_gradient


class Sharded(ParallelStrategy):
    """Stands before Lightning's strategy among the bases of a class, which says how it frees what it has gathered."""

    @abstractmethod
    def free_gathered(self) -> None:
        """Without a backward pass the root stays gathered, and with SHARD_GRAD_OP every unit; a load makes it stale."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Of `configure_model`: the values are rank 0's, and those of other ranks would be thrown away."""
        with torch.device("cpu" if self.global_rank == 0 else "meta"):
            yield

    def prepared(self) -> nn.Module:
        """The module, before anything of it is sharded.

        Raises:
            Refused: it does what a sharded strategy does, or can't be handed out.
        """
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise Refused(
                f"{type(module).__name__} optimizes by hand inside of training_step, where a sharded strategy has the "
                "parameters gathered; use strategy=ddp"
            )
        if lost := self.broadcast(left_on_meta(module), src=self.world_size - 1):
            raise Refused(
                f"{', '.join(lost)}: a tensor made in configure_model that is neither parameter nor buffer has no "
                "values on ranks other than 0; use register_buffer"
            )
        model = self.precision_plugin.convert_module(module)
        return self._layer_sync.apply(model) if self._layer_sync else model

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        assert self.model is not None
        share(self.model.buffers())  # as under ddp: the statistics of a batch norm differ by what a rank has seen
        return output

    def on_validation_end(self) -> None:
        self.free_gathered()

    def on_test_end(self) -> None:
        self.free_gathered()

    def on_predict_end(self) -> None:
        self.free_gathered()


def compute_again(unit: nn.Module) -> None:
    """Its activations, in the backward pass. Inside of the hooks that gather the parameters, which are at hand then."""
    patches.replace(unit, "forward", partial(checkpoint, unit.forward, use_reentrant=False))


def average_replicated(parameters: Iterable[nn.Parameter]) -> None:
    """The gradients of what every device holds whole."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.numel():
            parameter.register_post_accumulate_grad_hook(average_gradient)  # type: ignore[no-untyped-call]  # torch's
