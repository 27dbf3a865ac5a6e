"""Writes to weights outside the optimizer, in hooks and steps: which steps are examined for those that would be lost.

Examples are a momentum encoder, an average by hand, and clipped weights. In one process, a write changes the parameter
that the optimizer steps. A strategy that computes with a copy of that parameter would lose it, and refuses it by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property

from lightning.pytorch.strategies import Strategy
from torch import nn
from torch._guards import detect_fake_mode

from lightswitch.errors import Refused, listed

FIRST_STEP_ALONE = (
    "train the first step in one process (strategy=single trainer.devices=1 trainer.max_steps=1 run_id=NAME), and go "
    "on with the same run_id"
)
_FIRST = 3  # steps that are examined at first; later, those before a save: each look reads every weight


class WatchedWeights(Strategy):
    """Base of strategies that watch what hooks and steps do to weights; list it before Lightning's strategy."""

    loses_late_writes = True  # computes with copies of weights, so writes of unexamined training steps are lost
    _around: tuple[str, ExitStack] | None = None  # the current hook and its context

    @cached_property
    def looks(self) -> Looks:
        """Record of the training steps that are examined for writes."""
        return Looks()

    def asks_for_look(self) -> bool:
        """Return whether a save has to wait for the next step to be examined, and request that examination if so."""
        if self.loses_late_writes and self.looks.is_unseen:
            self.looks.ask()
            return True
        return False

    def whole_weights(self, hook: str) -> AbstractContextManager[None]:
        """Return a context in which a hook reads and writes weights as in one process, or is refused.

        Args:
            hook: description of the hook, such as "on_train_batch_end of MyModel".
        """
        return nullcontext()

    @contextmanager
    def around_hook(self, hook: str) -> Iterator[None]:
        """Context in which a user's hook runs; nested hooks use the outer hook's context."""
        if self._around is not None:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(self.whole_weights(hook))
            self._around = hook, stack
            try:
                yield
            finally:
                self._around = None

    @contextmanager
    def outside_of_hooks(self) -> Iterator[None]:
        """Context of strategy code that a hook calls, such as the step in a module's `optimizer_step`: it suspends the
        hook's context."""
        if self._around is None:
            yield
            return
        (hook, stack), self._around = self._around, None
        stack.close()
        yield  # no try/finally: an error ends the run
        hook = hook if hook.endswith(_AFTER) else hook + _AFTER
        stack.enter_context(self.whole_weights(hook))
        self._around = hook, stack


_AFTER = ", after the step"


class Looks:
    """Record of the steps that are examined for writes to weights that a strategy would lose.

    A look is the examination of one step. The first steps and those that a save may follow are examined: so writes that
    begin later are found, and refused before they are saved.

    Attributes:
        is_at_work: a step is running.
        is_due: the running step, or else the last training step, is examined.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._is_asked = False
        self._evaluated = Counter[str]()  # batches, by the name of the step
        self.is_at_work, self.is_due = False, False

    @property
    def is_unseen(self) -> bool:
        """Whether the last training step was not examined."""
        return self._steps > 0 and not self.is_due

    def ask(self) -> None:
        """Request that the next training step is examined, because a save may follow it."""
        self._is_asked = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a training step."""
        self._steps += 1
        self.is_due, self._is_asked = self._is_asked or self._steps <= _FIRST, False
        if self.is_due and detect_fake_mode() is not None:  # a simulated step has no values
            self.is_due = False
        self.is_at_work = True
        try:
            yield
        finally:
            self.is_at_work = False

    @contextmanager
    def evaluation(self, step: str) -> Iterator[None]:
        """Context of an evaluation step, of which the first ones are examined, and the training step that follows."""
        self._evaluated[step] += 1
        before = self.is_due
        self.is_at_work, self.is_due = True, self._evaluated[step] <= _FIRST and detect_fake_mode() is None
        yield  # no try/finally: an error ends the run
        self.is_at_work, self.is_due = False, before
        self.ask()


def refuse_bounded_rows(module: nn.Module) -> None:
    """Check that no embedding has a `max_norm`: its forward pass scales the rows that a rank's own samples read.

    Raises:
        Refused: one has.
    """
    kinds = nn.Embedding | nn.EmbeddingBag
    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, kinds)]
    if found := [name for name, part in parts if part.max_norm is not None]:
        raise Refused(
            f"{listed(found)} has a max_norm: its forward pass scales the rows that the rank's samples read, so ranks "
            "would differ; leave max_norm out and bound all rows in on_train_batch_end, or use strategy=single"
        )
