"""Checkpoints and model configs that a path given by the user stands for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightswitch import regular_files
from lightswitch.errors import UnfitCheckpoint

CONFIG = "config.yaml"


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint that a path stands for: itself, or the best of a run directory, else its last.

    Raises:
        UnfitCheckpoint: there is none.
    """
    if not path.exists():
        raise UnfitCheckpoint(f"{path}: there is no such file or directory")
    if not (path / CONFIG).is_file():
        return path
    for name in ("best.ckpt", "last.ckpt"):
        if (path / "checkpoints" / name).exists():
            return path / "checkpoints" / name
    raise UnfitCheckpoint(f"{path} has neither checkpoints/best.ckpt nor checkpoints/last.ckpt; name a checkpoint")


@dataclass(frozen=True)
class ModelConfig:
    """Config that a model is built from: its file, and the node in plain types."""

    file: Path
    node: dict[str, Any]

    @property
    def target(self) -> str:
        """Dotted path of the model's class."""
        return str(self.node["_target_"])


def model_config(checkpoint: Path, trust: bool = False) -> ModelConfig:
    """Return the model's node in the resolved config of the run that a checkpoint lies in.

    Args:
        trust: resolve interpolations, which may call whatever is registered as a resolver.

    Raises:
        UnfitCheckpoint: it lies in no run directory.
    """
    folders = checkpoint.resolve().parents[:2]
    for folder in folders:
        if (folder / CONFIG).is_file():
            return read_config(folder / CONFIG, key="model", trust=trust)
    raise UnfitCheckpoint(
        f"{checkpoint} has no {CONFIG} beside it, which names its model; leave it in its run directory"
    )


def read_config(path: Path, key: str | None = None, trust: bool = False) -> ModelConfig:
    """Return a model's node: the whole file, or what is under a key of it.

    Args:
        trust: resolve interpolations, which may call whatever is registered as a resolver.

    Raises:
        UnfitCheckpoint: the file can't be read, or has no such node.
    """
    try:
        node: Any = regular_files.read_yaml(path, resolve=trust)
    except (OSError, ValueError) as error:
        raise UnfitCheckpoint(f"{path} can't be read as a config: {error}") from error
    if key is not None:
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, dict) or "_target_" not in node:
        raise UnfitCheckpoint(f"{path} names no model: it has no {f'{key}.' if key else ''}_target_")
    return ModelConfig(path, node)
