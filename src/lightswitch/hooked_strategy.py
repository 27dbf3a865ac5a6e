"""A strategy of any class that lets the engine do what no hook of Lightning's comes for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from torch.optim import Optimizer

from lightswitch.mixins import Mixin, with_mixin


def hooked(strategy: Strategy) -> HookedStrategy:
    """Return a strategy, before a Trainer has it, with the engine's hooks."""
    return with_mixin(HookedStrategy, strategy)  # type: ignore[type-abstract]  # the strategy's class is concrete


class HookedStrategy(Mixin, Strategy):
    """A strategy of any class, some of whose methods let the engine do what no hook of Lightning's comes for.

    Attributes:
        ranks_launcher: starts the ranks in place of Lightning's launcher; None for that.
        meeting: context in which the process group is formed, before the user's code runs in it; None for none.
        on_step: called after each step of an optimizer; None for nothing.
    """

    ranks_launcher: _Launcher | None = None
    meeting: Callable[[], AbstractContextManager[None]] | None = None
    on_step: Callable[[], None] | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> HookedStrategy:
        """Return the strategy of a Trainer that was made with these hooks."""
        assert isinstance(trainer.strategy, cls), "give the Trainer hooked(strategy)"
        return trainer.strategy

    @property
    def launcher(self) -> _Launcher | None:
        return self.ranks_launcher or super().launcher

    def setup_environment(self) -> None:
        if self.meeting is None:
            super().setup_environment()
            return
        with self.meeting():
            super().setup_environment()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        if self.on_step is not None:
            self.on_step()
        return output
