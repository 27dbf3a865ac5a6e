"""The common part of both FSDPs: for modules that know nothing of sharding, and are built once, by rank 0."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightswitch import patches
from lightswitch.errors import Refused, listed
from lightswitch.strategies.initial_weights import left_on_meta
from lightswitch.strategies.rank_0 import broadcast_in_place
from lightswitch.strategies.replicated import average_gradient
from lightswitch.strategies.reversible import Reversible
from lightswitch.strategies.writes import CarriesWrites


class Sharded(CarriesWrites, Reversible, ParallelStrategy):
    """Base of sharded strategies; it comes before Lightning's among the bases of a class, which frees what it
    gathers."""

    @abstractmethod
    def free_gathered(self) -> None:
        """Free the parameters that are gathered.

        Without a backward pass the root stays gathered, and with SHARD_GRAD_OP every unit; loading makes them stale.
        """

    def forget_forward(self) -> None:
        self.free_gathered()

    @contextmanager
    def restored(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.free_gathered()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build on the CPU on rank 0, and on the meta device elsewhere, where values would be thrown away."""
        with torch.device("cpu" if self.global_rank == 0 else "meta"):
            yield

    def prepared(self) -> nn.Module:
        """Return the module before anything of it is sharded.

        Raises:
            Refused: it has a hook on a parameter's gradient, or keeps a tensor that can't be
                broadcast.
        """
        module = self.lightning_module
        assert module is not None
        if hooked := [name for name, one in module.named_parameters() if one._backward_hooks]:
            raise Refused(
                f"{listed(hooked)} has a hook on its gradient (register_hook), and a sharded strategy computes with "
                "another tensor in its place, which has none; use strategy=ddp"
            )
        if lost := self.broadcast(left_on_meta(module), src=self.world_size - 1):
            raise Refused(
                f"{', '.join(lost)}: a tensor made in configure_model that is neither parameter nor buffer has no "
                "values on ranks other than 0; use register_buffer"
            )
        model = self.precision_plugin.convert_module(module)
        return self._layer_sync.apply(model) if self._layer_sync else model

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.refusing_second_derivatives():
            return super().training_step(*args, **kwargs)

    @contextmanager
    def refusing_second_derivatives(self) -> Iterator[None]:
        """Context of a step, in which no gradient may be taken that is to be differentiated itself.

        Hooks gather a unit's parameters once for its forward and once for its backward pass: a third one meets shards,
        or loses a part of a gradient.

        Raises:
            Refused: the module takes one.
        """
        run: Callable[..., Any] = vars(torch.autograd)["_engine_run_backward"]  # of `backward` and of `grad`

        def run_once(outputs: Any, gradients: Any, keep: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
            if create_graph:
                assert self.lightning_module is not None
                raise Refused(
                    f"{first_name(self.lightning_module)} differentiates a gradient (create_graph=True), which goes "
                    "through each parameter a third time, when it is no longer gathered; use strategy=ddp"
                )
            return run(outputs, gradients, keep, create_graph, *args, **kwargs)

        patches.replace(torch.autograd, "_engine_run_backward", run_once)
        try:
            yield
        finally:
            patches.replace(torch.autograd, "_engine_run_backward", run)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with self.outside_of_hooks():
            output = super().optimizer_step(optimizer, closure, *args, **kwargs)
            assert self.model is not None
            # as under ddp: the statistics of a batch norm differ by what a rank has seen
            broadcast_in_place(self.model.buffers())
        return output

    def on_validation_end(self) -> None:
        self.free_gathered()

    def on_test_end(self) -> None:
        self.free_gathered()

    def on_predict_end(self) -> None:
        self.free_gathered()


def first_name(module: nn.Module) -> str:
    """Return the name of a module's own class: `fully_shard` gives it another."""
    return next(kind.__name__ for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def checkpoint_activations(unit: nn.Module) -> None:
    """Compute a unit's activations again in the backward pass, instead of keeping them.

    It happens inside of the hooks that gather the unit's parameters, which are there then.
    """
    patches.replace(unit, "forward", partial(checkpoint, unit.forward, use_reentrant=False))


@contextmanager
def in_full_shape(shapes: Mapping[nn.Parameter, torch.Size]) -> Iterator[None]:
    """Give parameters their full shapes, and no values, for `configure_optimizers`, which may group them by dimensions;
    shards are flat."""
    local = {parameter: parameter.data for parameter in shapes}
    for parameter, shape in shapes.items():
        parameter.data = parameter.data.new_zeros(()).expand(shape)
    try:
        yield
    finally:
        for parameter, data in local.items():
            parameter.data = data


def average_replicated(parameters: Iterable[nn.Parameter]) -> None:
    """Register hooks that average the gradients of parameters which every device holds whole, once they have any."""
    for parameter in parameters:
        if parameter.numel() and (parameter.is_floating_point() or parameter.is_complex()):
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # torch registers none else, and a callback may unfreeze it later
            parameter.register_post_accumulate_grad_hook(average_gradient)  # type: ignore[no-untyped-call]  # torch's
            parameter.requires_grad_(is_trained)
