"""The weights that a new run starts from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.errors import Refused


class InitialWeights(Callback):
    """Callback that gives a new run the weights of a checkpoint, and nothing else of it.

    Args:
        path: a checkpoint of any strategy, the engine's or Lightning's, or weights as the hub has them (safetensors). A
            run that goes on from its own ignores it.
        renamed: how names of the hub's weights begin, and how the model's do instead.
    """

    def __init__(self, path: str, renamed: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        self.renamed = renamed or {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            return
        if not isinstance(trainer.strategy, PortableCheckpoints):
            raise Refused(f"init_from: {type(trainer.strategy).__name__} can't read checkpoints of other strategies")
        trainer.strategy.start_from(self.path, self.renamed)
