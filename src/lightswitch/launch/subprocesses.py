"""The ranks that a plain `python train.py` starts: what becomes of them where the watch does not reach."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pickle import PicklingError
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerStatus

from lightswitch.launch import processes
from lightswitch.launch.mistakes import EXIT_CODE
from lightswitch.launch.unpicklable import first_unpicklable
from lightswitch.launch.watch.callback import Watch, verdict
from lightswitch.launch.watch.failure import FAILED, node_name
from lightswitch.refused import Refused


class Scripts(_SubprocessScriptLauncher):
    """Lightning's, less its observer, which kills this process when another has failed, without a word."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            processes.ranks[:] = self.procs
            threading.Thread(target=self._observe, name="ranks", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _observe(self) -> None:
        while not processes.are_watched.wait(0.2):
            for local_rank, process in enumerate(self.procs, start=1):
                if code := process.poll():
                    _end_with(self.cluster_environment.node_rank() * self.num_processes + local_rank, process.pid, code)


def _end_with(rank: int, pid: int, code: int) -> None:
    if code < 0:  # else it has told its error itself
        line = f"rank {rank} on {node_name()} failed: process {pid} {processes.how_ended(pid)} before it trained"
        print(line, file=sys.stderr, flush=True)
    processes.leave_now(EXIT_CODE if code == EXIT_CODE else FAILED)


class Workers(_MultiProcessingLauncher):
    """Lightning's, with callbacks that hear of an exception in the rank that raises it."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """
        Raises:
            Refused: the model or its data can't be sent to the ranks.
        """
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except (AttributeError, PicklingError, RuntimeError, TypeError) as error:
            if self._start_method == "fork" or self.procs or trainer is None:  # the ranks have been started
                raise
            owners = {"model": trainer.lightning_module, "data": getattr(trainer, "datamodule", None)}
            if (found := first_unpicklable({name: owner for name, owner in owners.items() if owner})) is None:
                raise
            raise Refused(
                f"{found}, which can't be sent to the processes that strategy=ddp_{self._start_method} starts; use "
                "strategy=ddp, which builds the model in each"
            ) from error

    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *rest: Any,
    ) -> None:
        processes.end_with_parent()
        try:
            super()._wrapping_function(process_idx, trainer, function, args, kwargs, *rest)
        except Exception as error:
            assert trainer is not None
            trainer.state.status = TrainerStatus.INTERRUPTED
            watch = next(callback for callback in trainer.callbacks if isinstance(callback, Watch))  # type: ignore[attr-defined]  # set past Lightning's declaration
            watch.on_exception(trainer, trainer.lightning_module, error)
            if (failure := verdict()) is None:
                raise
            processes.leave_now(failure.exit_code)  # torch would tell the other process of the error, once more


def with_word(trainer: Trainer) -> Trainer:
    """Whose launcher says a word of ranks that fail."""
    launcher = trainer.strategy.launcher
    if type(launcher) is _SubprocessScriptLauncher:
        trainer.strategy._launcher = Scripts(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
    elif type(launcher) is _MultiProcessingLauncher:
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it ends the others, which we say
        trainer.strategy._launcher = Workers(launcher._strategy, launcher._start_method)
    return trainer
