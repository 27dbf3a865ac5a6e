"""Handlers of the terminal and of train.log, which holds lines in memory until the run begins; what is not logged."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

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


class Terminal(logging.StreamHandler[TextIO]):
    """Stream handler that ignores write errors, such as those of a closed terminal; a print there ends the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class RunLog(logging.FileHandler):
    """File handler that writes only once the run has begun, so that a refused start adds nothing to an earlier log."""

    def __init__(self, filename: str, mode: str = "a", encoding: str | None = "utf-8", delay: bool = True) -> None:
        super().__init__(filename, "a", encoding, delay=True, errors="replace")  # a name may be no text
        self._held: list[str] | None = []
        # Hydra 1.4 writes the traceback that ended the run, which the log already has
        self.addFilter(lambda record: record.name != "hydra.core.utils")

    @property
    def has_begun(self) -> bool:
        return self._held is None

    def emit(self, record: logging.LogRecord) -> None:
        if self._held is not None:
            self._held.append(self.format(record) + self.terminator)
            return
        try:
            super().emit(record)
        except OSError:  # the file is opened at the first write
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore disk errors, such as a full disk; the terminal has the same lines."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def begin(self) -> None:
        """Write the held lines; from now on, write immediately."""
        if self._held is not None:
            first, self._held = self._held, None
            if first:
                with self.lock or contextlib.nullcontext(), contextlib.suppress(OSError):
                    self.stream = self.stream or self._open()
                    self.stream.write("".join(first))
                    self.flush()


def has_begun() -> bool:
    """Return whether this process writes its log immediately, because the run has begun."""
    return any(handler.has_begun for handler in _handlers())


def begin() -> None:
    """Call `RunLog.begin` of this process's handlers."""
    for handler in _handlers():
        handler.begin()


def _handlers() -> Iterator[RunLog]:
    return (handler for handler in logging.getLogger().handlers if isinstance(handler, RunLog))


def quiet_libraries() -> None:
    """Remove the handlers that Lightning adds on import, which would print each line twice; ignore `_SILENCED`."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.WARNING)
        logger.propagate = True
    for message in _SILENCED:
        warnings.filterwarnings("ignore", message=message)
