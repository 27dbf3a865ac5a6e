"""What differs between Hydra 1.3 and 1.4, which comes with OmegaConf 2.4: each warns of what the other expects."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import hydra.utils
from hydra.errors import HydraException, InstantiationException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

_utils: Any = hydra.utils
_IS_OLD = not hasattr(_utils, "execution_whitelist")
# Arguments of hydra.main, compose and initialize_*: 1.3 warns if the version is missing, 1.4 if it is given
VERSION: dict[str, Any] = {"version_base": "1.3"} if _IS_OLD else {}


def any_target() -> AbstractContextManager[Any]:
    """Return a context in which a config may name any code, which Hydra 1.4 deprecates without consent.

    The config of a run is the user's own; that of a checkpoint is checked before (export/models.py).
    """
    if _IS_OLD:
        return nullcontext()
    context: AbstractContextManager[Any] = _utils.execution_whitelist(_utils.UNSAFE_DISABLE_EXECUTION_CHECKS)
    return context


def instantiate(node: Any, **arguments: Any) -> Any:
    """Instantiate a config node, which may name any code; lists and dicts become plain Python objects.

    Raises:
        InstantiationException: from the constructor's error, which Hydra 1.4 raises as it is.
    """
    try:
        with any_target():
            return hydra.utils.instantiate(node, **arguments, _convert_="all")
    except (HydraException, OmegaConfBaseException):
        raise
    except Exception as error:
        raise InstantiationException(f"Error in a call to a target: {error!r}") from error


def register_resolver(name: str, resolver: Callable[..., object]) -> None:
    """Register an OmegaConf resolver, in place of one of this name."""
    register: Any = OmegaConf.register_new_resolver if _IS_OLD else OmegaConf.register_resolver
    register(name, resolver, replace=True)


def _as_partial(made: partial[Any]) -> tuple[Any, ...]:
    reduced = partial(made.func, *made.args, **made.keywords).__reduce__()
    assert isinstance(reduced, tuple)
    return reduced


# Hydra 1.4's partials can't be pickled, so Lightning's save_hyperparameters would drop a model's `optimizer`
with any_target():
    copyreg.pickle(type(hydra.utils.instantiate({"_target_": "builtins.dict", "_partial_": True})), _as_partial)
