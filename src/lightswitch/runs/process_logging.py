"""Logging of a run in each of its processes, without library warnings that the user can't act on."""

from __future__ import annotations

import logging
import logging.config
import warnings
from typing import Any

from lightning.pytorch import Callback

from lightswitch.runs import log as run_log

_SILENCED = (
    # Lightning 2.6 calls torch's pytree in a way that torch 2.13 deprecates; the user can't change it
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # shown in every run that srun did not start, on any machine with Slurm
    r"The `srun` command is available on your system but is not used",
    # a guess from the number of cores; data in memory is fastest without workers
    r"The '.*dataloader' does not have many workers",
    # the position is a function of the consumed samples; lightswitch.batches resumes from it exactly
    r"You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not resumable",
    # a resumed run writes to its directory again
    r"Checkpoint directory .* exists and is not empty",
    # a run that resumes another run's checkpoint finds the best one in its own directory
    r"The dirpath has changed from .* therefore `best_model_score`",
    # an epoch may be shorter than a logging interval: steps are counted over the whole run
    r"The number of training batches .* is smaller than the logging interval",
    # one process writes and reads its checkpoints alone
    r"torch.distributed is disabled, unavailable or uninitialized",
    # lightswitch.batches synchronizes values that are logged in an evaluation
    r"It is recommended to use `self.log\(.*sync_dist=True\)`",
)


class ProcessLogging(Callback):
    """Silence libraries on creation; also configure logging in spawned processes, which unpickle callbacks first.

    Args:
        config: for `logging.config.dictConfig`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._held: list[str] = []  # lines of train.log, from the process that spawned this one
        _quiet()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": run_log.held()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        logging.config.dictConfig(self.config)
        run_log.hold(self._held)
        _quiet()


def _quiet() -> None:
    """Remove the handlers that Lightning adds on import, which would print each line twice; ignore `_SILENCED`."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.WARNING)
        logger.propagate = True
    for message in _SILENCED:
        warnings.filterwarnings("ignore", message=message)
