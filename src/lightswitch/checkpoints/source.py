"""Which checkpoint a path means, and which model it is of."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # it comes with omegaconf, its types do not

from lightswitch.checkpoints.reader import UnfitCheckpoint

CONFIG = "config.yaml"


def checkpoint_at(path: Path) -> Path:
    """The checkpoint itself; of a run directory its best one, else its last.

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


def model_config(checkpoint: Path) -> DictConfig:
    """The model's node of the resolved config of the run that the checkpoint lies in.

    Raises:
        UnfitCheckpoint: it lies in no run directory.
    """
    folders = checkpoint.resolve().parents[:2]
    for folder in folders:
        if (folder / CONFIG).is_file():
            return read_config(folder / CONFIG, key="model")
    raise UnfitCheckpoint(
        f"{checkpoint} has no {CONFIG} beside it, which names its model; leave it in its run directory"
    )


def read_config(path: Path, key: str | None = None) -> DictConfig:
    """A model's node: the whole file, or what is under a key of it."""
    try:
        node = OmegaConf.load(path)
        node = node if key is None else OmegaConf.select(node, key)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise UnfitCheckpoint(f"{path} can't be read as a config: {' '.join(str(error).split())}") from error
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise UnfitCheckpoint(f"{path} names no model: it has no {f'{key}.' if key else ''}_target_")
    return node
