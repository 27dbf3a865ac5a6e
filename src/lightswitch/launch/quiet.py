"""Lightning's own notes, kept off a run's output where they say what train.py says shorter, or what is not so."""

from __future__ import annotations

import logging
import warnings

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
    # an epoch may be shorter than a logging interval: steps are counted over the whole run
    r"The number of training batches .* is smaller than the logging interval",
)


def quiet() -> None:
    """To be called after Lightning is imported: on import it sets up handlers of its own, which print twice."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.WARNING)
        logger.propagate = True
    for message in _NOT_SO:
        warnings.filterwarnings("ignore", message=message)
