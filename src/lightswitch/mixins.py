"""Mixins for objects that other code has constructed, and typed access to attributes that Lightning does not declare.

A mixin overrides methods as any subclass does, but its base class is known only once the object exists: the class of a
strategy that a config names, or of a precision plugin that Lightning chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer


class Mixin:
    """Base of mixins."""


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
