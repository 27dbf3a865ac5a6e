"""Writes to weights outside of the optimizer, by hooks and within training steps, and what strategies make of them.

A momentum encoder, an average by hand, clipped weights, weights that are set from the first batch: in one process a
write to a parameter is a write. A strategy that computes with another copy of the weights than it steps has to bring it
there, and replicas that are written to from shares of a batch have to agree.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch._guards import detect_fake_mode

from lightswitch.errors import Refused, listed
from lightswitch.strategies.replicas import broadcast_in_place

log = logging.getLogger(__name__)

_FIRST, EVERY = 3, 128  # training steps that are looked at, beside those before a save: a look reads every weight


class CarriesWrites(Strategy):
    """Base of strategies that carry writes of hooks to the weights that they step; it comes before Lightning's."""

    loses_late_writes = True  # of training steps that are not looked at, as they compute with copies
    _around: tuple[str, ExitStack] | None = None  # the hook that runs

    @cached_property
    def looks(self) -> Looks:
        """Looks at training steps."""
        return Looks()

    def asks_for_look(self) -> bool:
        """Have the next step looked at where the last one was not, and return whether a save has to wait for it."""
        if self.loses_late_writes and self.looks.is_unseen:
            self.looks.ask()
            return True
        return False

    def forget_forward(self) -> None:
        """Make ready for another forward pass in place of the last one, whose backward pass does not come."""

    def at_hand(self, hook: str) -> AbstractContextManager[None]:
        """Return a context in which a hook finds whole weights, and after which what it wrote is carried.

        Args:
            hook: in words, as on_train_batch_end of MyModel.
        """
        return nullcontext()

    @contextmanager
    def around_hook(self, hook: str) -> Iterator[None]:
        """Context in which a hook of the user's runs; of hooks within one another, the outer one's."""
        if self._around is not None:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(self.at_hand(hook))
            self._around = hook, stack
            try:
                yield
            finally:
                self._around = None

    @contextmanager
    def outside_of_hooks(self) -> Iterator[None]:
        """Context of what a hook leaves to the strategy: an `optimizer_step` of the module calls for a whole step."""
        if self._around is None:
            yield
            return
        (hook, stack), self._around = self._around, None
        stack.close()
        yield  # after an error the run ends
        hook = hook if hook.endswith(_AFTER) else hook + _AFTER
        stack.enter_context(self.at_hand(hook))
        self._around = hook, stack


_AFTER = ", after the step"


class Looks:
    """Record of the training steps that are looked at, and of what was found in them.

    The first steps are, those that a save may follow, and a few others: what begins to be written later is found, and
    refused before it is saved.

    Attributes:
        is_at_work: within a training step.
        is_due: the training step at work, or else the last, is looked at.
        is_first: and it is one of the first.
        written: names of parameters that the last look found to be written within a training step.
        shared: those of them that ranks have written otherwise, each from its share of a batch.
        known: names that any look has found.
        are_set_from_shares: the first steps have found `shared` in the last one, and not before.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._is_asked = False
        self.are_set_from_shares = False
        self.is_at_work, self.is_due, self.is_first = False, False, False
        self.written: set[str] = set()
        self.shared: set[str] = set()
        self.known: set[str] = set()

    @property
    def is_before_first(self) -> bool:
        """Whether one of the first steps comes next, and has values, as one that is planned has not."""
        return self._steps < _FIRST and detect_fake_mode() is None

    @property
    def is_unseen(self) -> bool:
        """Whether the last training step was not looked at."""
        return self._steps > 0 and not self.is_due

    def ask(self) -> None:
        """Have the next training step looked at, as what it leaves may be saved."""
        self._is_asked = True

    def forget_step(self) -> None:
        """Count the last step out: it is made again."""
        self._steps -= 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a training step."""
        self._steps += 1
        self.are_set_from_shares = False
        self.is_due, self._is_asked = self._is_asked or self._steps <= _FIRST or self._steps % EVERY == 0, False
        if self.is_due and detect_fake_mode() is not None:  # a step that is planned has no values
            self.is_due = False
        self.is_first = self.is_due and self._steps <= _FIRST
        if self.is_due:
            self.written, self.shared = set(), set()
        self.is_at_work = True
        try:
            yield
        finally:
            self.is_at_work = False

    def found(self, written: set[str], shared: set[str]) -> None:
        """Note what a look has found.

        Raises:
            Refused: a later look finds what the first did not: what was written since is lost.
        """
        self.refuse_late(written)
        new = sorted(shared - self.known)
        self.are_set_from_shares |= self.is_first and bool(new)
        if new and dist.get_rank() == 0:
            log.info(
                "weights    %s set within training_step, by each rank from its share of the batch: all take rank 0's",
                listed(new, "parameters"),
            )
        self.known |= written
        self.written |= written
        self.shared |= shared

    def refuse_late(self, written: set[str]) -> None:
        """Check that parameters were written within a training step in the first ones, too.

        Raises:
            Refused: one was not.
        """
        if self._steps > _FIRST and (late := sorted(written - self.known)):
            raise Refused(
                f"{listed(late, 'parameters')} was written within training_step, which it was not in the first steps, "
                "and the strategy has not kept it; write in a hook, as on_train_batch_end, or use strategy=ddp"
            )


def share(parameters: Mapping[str, Tensor]) -> set[str]:
    """Give all ranks rank 0's values of tensors that differ, and return the names of these. Collective."""
    if not parameters or not dist.is_initialized() or dist.get_world_size() == 1:
        return set()
    digests = torch.stack([_digest(tensor) for tensor in parameters.values()])  # (tensors, 2)
    highest = torch.cat([digests, -digests])
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    differ = (highest[: len(digests)] != -highest[len(digests) :]).any(1).tolist()
    names = {name for name, differs in zip(parameters, differ, strict=True) if differs}
    take_rank_0s(parameters[name] for name in parameters if name in names)
    return names


def take_rank_0s(parameters: Iterable[Tensor]) -> None:
    """Overwrite parameters by rank 0's, of which autograd, that may keep them for a backward pass, takes no notice.
    Collective."""
    broadcast_in_place(parameter.data for parameter in parameters)


@torch.no_grad()
def _digest(tensor: Tensor) -> Tensor:
    """Return the sum and the norm of a tensor: (2,)."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    dtype = torch.promote_types(values.dtype, torch.float32)
    sums = values.sum(dtype=dtype), torch.linalg.vector_norm(values.to(dtype))
    return torch.nan_to_num(torch.stack(sums).double())


@torch.no_grad()
def carried(written: Tensor, kept: Tensor) -> Tensor:
    """Copy into what is kept those elements that were changed in a copy of it, and return whether there are any.

    Args:
        written: a copy of `kept`, maybe of fewer bits, which lose no change this way.
    """
    own = written.to(kept.device)
    same = kept.to(own.dtype) == own
    kept.copy_(torch.where(same, kept, own.to(kept.dtype)))
    return ~same.all()
