"""The run's logging in every process of it, without Lightning's own notes where train.py says the same, shorter."""

from __future__ import annotations

import logging
import logging.config
import warnings
from typing import Any

from lightning.pytorch import Callback

from lightswitch.runs import log as run_log

_NOT_SO = (
    # Lightning 2.6 asks torch's pytree in a way that torch 2.13 deprecates; nothing a user can mend
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # said to every run that srun did not start, on any machine where Slurm is installed
    r"The `srun` command is available on your system but is not used",
    # a guess from the number of cores; data in memory is fastest without workers
    r"The '.*dataloader' does not have many workers",
    # position is a function of samples consumed: lightswitch.batches resumes it exactly
    r"You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not resumable",
    # the run directory is meant to be written again when a run is resumed
    r"Checkpoint directory .* exists and is not empty",
    # a run that goes on from another one's checkpoint finds the best of its own directory
    r"The dirpath has changed from .* therefore `best_model_score`",
    # an epoch may be shorter than a logging interval: steps are counted over the whole run
    r"The number of training batches .* is smaller than the logging interval",
    # one process writes and reads its checkpoints alone
    r"torch.distributed is disabled, unavailable or uninitialized",
    # lightswitch.batches synchronises what is logged in evaluation
    r"It is recommended to use `self.log\(.*sync_dist=True\)`",
)


class ProcessLogging(Callback):
    """Set up where it is made, and again in a process that Python spawned, which starts with none: there, callbacks
    are unpickled before anything else is done.

    Args:
        config: of `logging.config.dictConfig`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._held: list[str] = []  # of train.log, by the process that spawned this one
        _quiet()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": run_log.held()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        logging.config.dictConfig(self.config)
        run_log.hold(self._held)
        _quiet()


def _quiet() -> None:
    """Lightning sets up handlers of its own when it is imported, beside the root's: each line would come twice."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.WARNING)
        logger.propagate = True
    for message in _NOT_SO:
        warnings.filterwarnings("ignore", message=message)
