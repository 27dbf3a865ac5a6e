"""Methods of the engine's before those of an object that someone else's code makes, by a subclass of its class.

A method is overridden as in any subclass; only that the class is known once the object is there, as a strategy that a
config names, or a precision that Lightning chooses.
"""

from __future__ import annotations

from typing import Any, TypeVar


class Mixin:
    """Base of what comes before an object's own class; a copy, as in a process that Python spawns, has it as well."""

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


def _without_state(*bases: type) -> Any:
    """Return an object of a class that is made of mixins and, as the last one, the class that it stands for."""
    own = bases[-1]
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    kind: Any = type(own.__name__, bases, names)
    return kind.__new__(kind)
