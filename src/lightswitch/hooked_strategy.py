"""Mixins, and that of strategies of any class: calls to the engine where Lightning has no hook, unequal gathers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightswitch.collectives import mean_of_ranks, of_ranks
from lightswitch.errors import Refused, listed

log = logging.getLogger(__name__)


class Mixin:
    """Base of classes that are mixed into the class of an object that other code has constructed.

    A mixin overrides methods as any subclass does, but its base class is known only once the object exists: the class
    of a strategy that a config names, or of a precision plugin that Lightning chooses.
    """


Mixed = TypeVar("Mixed", bound=Mixin)


def with_mixin(mixin: type[Mixed], given: Any) -> Mixed:
    """Return a shallow copy of an object whose class is a subclass with the mixin's methods.

    The subclass has the name of the original class, as reports and checkpoints contain it. An object that already has
    the mixin is returned unchanged.
    """
    if isinstance(given, mixin):
        return given
    bases = type(given).__bases__ if isinstance(given, Mixin) else (type(given),)
    own = bases[-1]
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    kind: Any = type(own.__name__, (mixin, *bases), names)
    made: Mixed = kind.__new__(kind)
    vars(made).update(vars(given))
    return made


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's list of callbacks itself: callbacks added to it are called."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector of Lightning's sets it
    return callbacks


def hooked(strategy: Strategy) -> HookedStrategy:
    """Return a strategy with the engine's hooks. Call it before the strategy is passed to a Trainer."""
    return with_mixin(HookedStrategy, strategy)  # type: ignore[type-abstract]  # the strategy's class is concrete


class HookedStrategy(Mixin, Strategy):
    """A strategy of any class, some of whose methods call the engine at points where Lightning has no hook.

    Attributes:
        ranks_launcher: starts the ranks instead of Lightning's launcher; None for Lightning's.
        meeting: context in which the process group is formed, before the user's code runs; None for none.
        share: returns the data loader that this rank reads instead of the given one; None for the given loader.
        on_data: called before `prepare_data` and again before `setup`; None for nothing.
        on_loaders: called before loaders are requested, with whether they are for training; None for nothing.
        on_batch: called before a training batch is passed to the hooks that move it; None for nothing.
        on_output: called with the return value of `training_step`; None for nothing.
        loss_weight: returns the weight of this rank's loss in the mean over a step; None if all ranks weigh the same.
        on_start: called when training starts, after the module's `on_train_start`; None for nothing.
        on_step: called after each optimizer step; None for nothing.
    """

    ranks_launcher: _Launcher | None = None
    _on_built: Sequence[Callable[[], None]] = ()
    meeting: Callable[[], AbstractContextManager[None]] | None = None
    share: Callable[[object], object] | None = None
    on_data: Callable[[], None] | None = None
    on_loaders: Callable[[bool], None] | None = None
    on_batch: Callable[[], None] | None = None
    on_output: Callable[[Any], None] | None = None
    loss_weight: Callable[[], float | Tensor] | None = None
    on_start: Callable[[], None] | None = None
    on_step: Callable[[], None] | None = None
    _has_filled_rows = False
    _evaluates_losses = False  # an optimizer needs the loss, and ranks have different ones

    @classmethod
    def of(cls, trainer: Trainer) -> HookedStrategy:
        """Return a Trainer's strategy, which must have these hooks."""
        assert isinstance(trainer.strategy, cls), "give the Trainer hooked(strategy)"
        return trainer.strategy

    def when_built(self, action: Callable[[], None]) -> None:
        """Call an action once when the module has all its parts, after its `setup` and `configure_model`, and before it
        is sharded."""
        self._on_built = (*self._on_built, action)

    @property
    def launcher(self) -> _Launcher | None:
        return self.ranks_launcher or super().launcher

    def setup_environment(self) -> None:
        with self.meeting() if self.meeting else nullcontext():
            super().setup_environment()
        if self.on_data is not None:
            self.on_data()

    def barrier(self, name: str | None = None) -> None:
        barrier: Any = super().barrier  # type: ignore[safe-super]  # the strategy's class has one
        barrier(name)
        if name == "pre_setup" and self.on_data is not None:  # Lightning's name of the barrier before `setup`
            self.on_data()

    def setup(self, trainer: Trainer) -> None:
        """Set the strategy up, for a module whose tensors can be saved and, on several devices, sent.

        Raises:
            Refused: one has no shape yet, or is sparse.
        """
        module = trainer.lightning_module
        named = dict(chain(module.named_parameters(), module.named_buffers()))
        if lazy := [name for name, tensor in named.items() if is_lazy(tensor)]:
            raise Refused(
                f"{listed(lazy)}: a lazy layer (LazyLinear, or -1 channels) has no shape before its first forward "
                "pass, but an optimizer and checkpoints need one; call the module on a batch, under torch.no_grad(), "
                "at the end of its constructor or in setup, or give the layer its number of inputs"
            )
        if trainer.world_size > 1 and (sparse := [n for n, one in named.items() if one.layout != torch.strided]):
            raise Refused(
                f"{listed(sorted(sparse))}: sparse and jagged tensors can't be sent to other devices; register their "
                "indices and values as buffers, and make the tensors of them where they are used"
            )
        actions, self._on_built = self._on_built, ()
        for action in actions:
            action()
        super().setup(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        return super().process_dataloader(self.share(dataloader) if self.share else dataloader)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Initialize weights on the CPU, as a constructor does, unless the strategy's class overrides this method.

        Lightning would initialize them on the device, whose generator gives other numbers.
        """
        own = super().tensor_init_context
        is_lightnings = getattr(own, "__func__", None) is Strategy.tensor_init_context
        with nullcontext() if is_lightnings else own(empty_init):
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; integers are reduced in double precision.

        Lightning weights synchronised metrics by a mean of int64 batch sizes, which it would truncate if ranks differ:
        37 samples over 2 ranks gave .777 instead of .756. A single process skips the conversion: it has nothing to
        reduce, and Apple's GPUs have no 64-bit floats.
        """
        reduce: Any = super().reduce  # type: ignore[safe-super]  # the strategy's class has one
        if getattr(self, "world_size", 1) == 1 or not isinstance(tensor, Tensor) or tensor.is_floating_point():
            return reduce(tensor, group, reduce_op)
        reduced = reduce(tensor.double(), group, reduce_op)
        return reduced.to(tensor.dtype) if str(reduce_op).lower().endswith("sum") else reduced

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from each rank; the number of rows may differ.

        The engine reads each sample once, so ranks may differ by a row; Lightning's sampler repeats samples instead,
        and gloo aborts the process if shapes differ.

        Raises:
            Refused: shapes differ in more than the number of rows.
        """
        # a planned (fake) tensor has no values to exchange
        shapes = [] if isinstance(tensor, FakeTensor) else of_ranks(tuple(tensor.shape), group)
        if len(set(shapes)) > 1:
            tensor = filled(tensor, shapes)
            rows = [shape[0] for shape in shapes]
            if getattr(self, "global_rank", 0) == 0 and not self._has_filled_rows:
                log.info(
                    "self.all_gather: ranks have from %d to %d rows; shorter tensors are padded by repeating their "
                    "last row, as Lightning's sampler repeats samples", min(rows), max(rows),
                )  # fmt: skip
            self._has_filled_rows = True
        return super().all_gather(tensor, group, sync_grads)  # type: ignore[safe-super]  # the strategy's class has one

    def on_train_start(self) -> None:
        super().on_train_start()
        several = getattr(self, "world_size", 1) > 1
        self._evaluates_losses = several and any(map(needs_closure, self.optimizers))
        if self.on_start is not None:
            self.on_start()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if self.on_output is not None:
            self.on_output(output)
        return output

    @torch.no_grad()
    def multiply_gradients(self, optimizer: Optimizer, factor: Tensor) -> None:
        """Multiply the gradients of an optimizer's next step by a scalar tensor on the strategy's device."""
        if (own := getattr(super(), "multiply_gradients", None)) is not None:
            own(optimizer, factor)  # of a strategy that does not expose gradients
            return
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if (gradient := parameter.grad) is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.mul_(factor.to(local.device))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if self._evaluates_losses:
            closure = partial(self._loss_of_all_ranks, closure)
        output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        if self.on_step is not None:
            self.on_step()
        return output

    def _loss_of_all_ranks(self, closure: Callable[[], Any]) -> Any:
        """Return the mean of a loss over the samples of all ranks, so that all ranks take the same step and evaluate
        the loss equally often. Collective."""
        loss = closure()
        if not isinstance(loss, Tensor):
            return loss
        weight = torch.as_tensor(
            1.0 if self.loss_weight is None else self.loss_weight(), dtype=loss.dtype, device=loss.device
        )
        weighted, weights = mean_of_ranks(torch.stack([loss.detach() * weight, weight]))
        return weighted / weights


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer requires a closure that evaluates the loss, as LBFGS does."""
    kind: Any = type(optimizer)  # hashable, which its type does not tell
    return _needs_closure(kind)


@cache
def _needs_closure(kind: Any) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def filled(tensor: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """Return a tensor padded to the number of rows of the longest: by its last row, or by zeros if it has no row.

    The result stays in the autograd graph even if the tensor has no row: the other ranks' backward passes wait for
    this rank's.

    Raises:
        Refused: shapes differ in more than the number of rows.
    """
    first = shapes[0]
    for rank, shape in enumerate(shapes):
        if shape != first and (not first or not shape or shape[1:] != first[1:]):
            raise Refused(
                f"self.all_gather: rank 0 has a tensor of shape {first}, rank {rank} one of {shape}; shapes may differ "
                "only in the first dimension, the samples"
            )
    lacking = max(shape[0] for shape in shapes) - len(tensor)
    last = tensor[-1:] if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:])
    return torch.cat([tensor, last.expand(lacking, *tensor.shape[1:])])
