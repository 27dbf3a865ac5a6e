"""Which checkpoint a run starts from."""

from __future__ import annotations

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightswitch.batches.position import read_position
from lightswitch.checkpoints.find import newest
from lightswitch.launch.mistakes import Mistakes


def find(cfg: DictConfig) -> Path | None:
    """
    Raises:
        Mistakes: the run differs from the checkpoint's in what decides the sample order.
    """
    if cfg.mode != "fit":
        return Path(cfg.ckpt_path)
    if cfg.resume == "never":
        return None
    if cfg.resume == "auto":
        found = newest(Path(HydraConfig.get().runtime.output_dir))
        if found is None:
            return None
        path, position = found
    else:
        path, position = Path(cfg.resume), read_position(Path(cfg.resume))
    difference = (
        position.difference(cfg.seed, cfg.global_batch_size)
        if position
        else "it names no position in its data"
    )
    if difference:
        raise Mistakes(
            [f"{path} can't be resumed: {difference}; start anew with resume=never or another run_id"]
        )
    return path
