"""Mixins for objects that other code has constructed, and typed access to attributes that Lightning does not declare.

A mixin overrides methods as any subclass does, but its base class is known only once the object exists: the class of a
strategy that a config names, or of a precision plugin that Lightning chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer


class Mixin:
    """Base of mixins. Copies of an object retain its mixin, also in other processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_state, type(self).__bases__, self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        inherited: Any = super().__getstate__()
        return dict(inherited or {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        inherited = getattr(super(), "__setstate__", None)
        if inherited:
            inherited(state)
        else:
            self.__dict__.update(state)


Mixed = TypeVar("Mixed", bound=Mixin)


def with_mixin(mixin: type[Mixed], given: Any) -> Mixed:
    """Return a shallow copy of an object whose class is a subclass with the mixin's methods.

    The subclass has the name of the original class, as reports and checkpoints contain it. An object that already has
    the mixin is returned unchanged.
    """
    if isinstance(given, mixin):
        return given
    own = type(given).__bases__ if isinstance(given, Mixin) else (type(given),)
    made: Mixed = _without_state(mixin, *own)
    made.__setstate__(dict(vars(given)))
    return made


def mixed_class(*bases: type) -> Any:
    """Return a class derived from mixins and, last, the class whose name it takes."""
    own = bases[-1]
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, bases, names)


def _without_state(*bases: type) -> Any:
    kind = mixed_class(*bases)
    return kind.__new__(kind)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's list of callbacks itself: callbacks added to it are called."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector of Lightning's sets it
    return callbacks
