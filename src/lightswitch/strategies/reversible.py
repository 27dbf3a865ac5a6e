"""Strategies that keep weights in another form than the module's, where steps are tried and undone."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager

from lightning.pytorch.strategies import Strategy


class Reversible(Strategy):
    """Base of strategies that hold more than the tensors of the module, or hold these in another form at times."""

    @abstractmethod
    def restored(self) -> AbstractContextManager[None]:
        """Return a context that leaves what is held beside the module as it was, and nothing of the module gathered.

        The optimizer is left to the caller, who makes it anew by `setup_optimizers`.
        """
