"""Mixins for objects that someone else's code has made, and the types of attributes that Lightning does not declare.

A method is overridden as in any subclass, but the class to derive from is known only once the object is there: that of
a strategy which a config names, or of a precision that Lightning chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer


class Mixin:
    """Base of mixins. Copies of an object with a mixin have it as well, also in processes that Python spawns."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_state, type(self).__bases__, self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        inherited = getattr(super(), "__getstate__", None)  # Python 3.10 has none for every object
        return dict(inherited() or {}) if inherited else dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        inherited = getattr(super(), "__setstate__", None)
        if inherited:
            inherited(state)
        else:
            self.__dict__.update(state)


Mixed = TypeVar("Mixed", bound=Mixin)


def with_mixin(mixin: type[Mixed], given: Any) -> Mixed:
    """Return a shallow copy of an object, of a subclass of the object's class that has the mixin's methods.

    The subclass has the name of the class: it stands in reports and in checkpoints. An object that has the mixin is
    returned as it is.
    """
    if isinstance(given, mixin):
        return given
    own = type(given).__bases__ if isinstance(given, Mixin) else (type(given),)
    made: Mixed = _without_state(mixin, *own)
    made.__setstate__(dict(vars(given)))
    return made


def mixed_class(*bases: type) -> Any:
    """Return a class that is made of mixins and, as the last one, the class whose name it has."""
    own = bases[-1]
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, bases, names)


def _without_state(*bases: type) -> Any:
    kind = mixed_class(*bases)
    return kind.__new__(kind)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's own list of its callbacks: what is put into it is called as well."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector of Lightning's sets it
    return callbacks
