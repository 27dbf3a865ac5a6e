"""Paths of other checkpoints in a checkpoint, which are used only where they lie in the run's own folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint


def trusted_states(states: Mapping[str, Any], callbacks: Iterable[Callback]) -> dict[str, Any]:
    """Return the states of callbacks, without paths that lead out of the folder a callback writes checkpoints to.

    Lightning removes and reads what they name. A state that names something else, as that of another run does, is
    replaced by one that knows no checkpoint.

    Args:
        states: by the callbacks' state keys, as a checkpoint holds them.
        callbacks: of this run.
    """
    own = {callback.state_key: callback for callback in callbacks if isinstance(callback, ModelCheckpoint)}
    return {
        key: _empty_state(own[key]) if key in own and not _is_of(own[key], state) else state
        for key, state in states.items()
    }


def is_within(path: Any, folder: Path) -> bool:
    """Return whether a path lies below a folder once links and `..` are followed."""
    try:
        return isinstance(path, str | Path) and folder.resolve() in Path(path).resolve().parents
    except (OSError, ValueError, RuntimeError):  # a loop of links, or no path at all
        return False


def _is_of(callback: ModelCheckpoint, state: Any) -> bool:
    if not isinstance(state, dict) or callback.dirpath is None:
        return False
    best = state.get("best_k_models", {})
    kth = state.get("kth_best_model_path", "")
    if not isinstance(best, dict) or (kth not in best and (kth or 0 < callback.save_top_k <= len(best))):
        return False
    named = [state.get("best_model_path", ""), state.get("last_model_path", ""), kth, *best]
    return all(path == "" or is_within(path, Path(callback.dirpath)) for path in named)


def _empty_state(callback: ModelCheckpoint) -> dict[str, Any]:
    """Return the state that Lightning has before the first checkpoint."""
    return {"dirpath": callback.dirpath, "best_model_score": None, "best_model_path": ""}
