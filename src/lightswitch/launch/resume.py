"""Which checkpoint a run starts from."""

from __future__ import annotations

import logging
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightswitch.batches.position import Position
from lightswitch.checkpoints.find import newest, position_of
from lightswitch.launch import placement
from lightswitch.refused import Refused

log = logging.getLogger(__name__)


def find(cfg: DictConfig) -> Path | None:
    """The checkpoint that ``cfg.mode`` reads; None for a run that starts at step 0.

    Raises:
        Refused: the checkpoint can't be read, or the run differs from its run in what decides the sample order.
    """
    if cfg.mode != "fit":
        _position(Path(cfg.ckpt_path))
        return Path(cfg.ckpt_path)
    if cfg.init_from:
        _position(Path(cfg.init_from))
    path, position = _to_resume(cfg.resume, Path(HydraConfig.get().runtime.output_dir))
    if path is None:
        return None
    lost = position.difference(cfg.seed, cfg.global_batch_size) if position else "it names no position in the data"
    if lost:
        raise Refused(
            f"{shown(path)} can't be resumed: {lost}; start anew with resume=never or another run_id, "
            f"or from its weights alone with init_from={shown(path)} and another run_id"
        )
    if position and 0 <= cfg.trainer.max_steps <= position.global_step:
        log.info(
            "finished   the run stands at step %d already; a higher trainer.max_steps goes on", position.global_step
        )
    return path


def shown(path: Path) -> str:
    """Relative where it lies below the working directory: as it can be pasted."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _to_resume(resume: str, run_dir: Path) -> tuple[Path | None, Position | None]:
    if resume == "auto":
        return newest(run_dir, thoroughly=_is_first()) or (None, None)
    if resume == "never":
        return None, None
    return Path(resume), _position(Path(resume))


def _position(path: Path) -> Position | None:
    return position_of(path, thoroughly=_is_first())


def _is_first() -> bool:
    """Checksums are compared by one process of the run: the strategies hand its path to the others."""
    return placement.detect().rank == 0
