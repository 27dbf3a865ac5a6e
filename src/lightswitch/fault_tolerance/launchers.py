"""The ranks that a plain `python train.py` starts: what becomes of them where the watch does not reach."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from pickle import PicklingError
from tempfile import TemporaryDirectory
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerStatus
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException

from lightswitch import patches
from lightswitch.cluster import processes
from lightswitch.errors import Ended, ExitCode, Refused, Stopped
from lightswitch.fault_tolerance.failure import Failure, RanksFailed, node_name
from lightswitch.fault_tolerance.unpicklable import first_unpicklable
from lightswitch.fault_tolerance.watchdog.callback import Watch, verdict
from lightswitch.runs import log as run_log


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
    processes.leave_now(ExitCode.REFUSED if code == ExitCode.REFUSED else ExitCode.FAILED)


class Workers(_MultiProcessingLauncher):
    """Lightning's, whose ranks say themselves what they fail of.

    torch hands on the text of a traceback alone. A rank that fails knows more: it leaves a record of it in a folder,
    where this process, which started it, finds it.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """
        Raises:
            RanksFailed: a rank did.
            Refused: the model or its data can't be sent to the ranks.
        """
        with TemporaryDirectory(prefix="lightswitch_") as folder:
            self._records = Path(folder)
            try:
                results = super().launch(function, *args, trainer=trainer, **kwargs)
            except ProcessException as error:
                raise self._failed(error) from None
            except (AttributeError, PicklingError, RuntimeError, TypeError) as error:
                if refusal := self._unsendable(trainer):
                    raise refusal from error
                raise
            finally:
                run_log.follow()
        processes.steps_have_begun.set()
        return results

    def _unsendable(self, trainer: Trainer | None) -> Refused | None:
        """None where the ranks have been started, or all can be pickled."""
        if self._start_method == "fork" or self.procs or trainer is None:
            return None
        owners = {"model": trainer.lightning_module, "data": getattr(trainer, "datamodule", None)}
        found = first_unpicklable({name: owner for name, owner in owners.items() if owner})
        return (
            None
            if found is None
            else Refused(
                f"{found}, which can't be sent to the processes that strategy=ddp_{self._start_method} starts; use "
                "strategy=ddp, which builds the model in each"
            )
        )

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
        if self._already_fit:  # by other processes
            processes.steps_have_begun.set()
        try:
            super()._wrapping_function(process_idx, trainer, function, args, kwargs, *rest)
        except (Stopped, Ended):
            raise
        except BaseException as error:
            assert trainer is not None
            patches.replace(trainer.state, "status", TrainerStatus.INTERRUPTED)
            watch = next(callback for callback in trainer.callbacks if isinstance(callback, Watch))  # type: ignore[attr-defined]  # set past Lightning's declaration
            first = watch.failure(error, trainer)
            self._leave_record(process_idx, first)
            processes.leave_now(first.exit_code)  # torch would tell the other process of the error, once more

    def _leave_record(self, process_idx: int, failure: Failure) -> None:
        record = {"failure": asdict(failure), "is_told": verdict() is not None, "seconds": time.time()}
        partial = self._records / f"{process_idx}.partial"
        partial.write_text(json.dumps(record))
        partial.rename(partial.with_suffix(".json"))

    def _failed(self, error: ProcessException) -> RanksFailed:
        exit_code = error.exit_code if isinstance(error, ProcessExitedException) else None
        records = [json.loads(path.read_text()) for path in self._records.glob("*.json")]
        if records:
            first = min(records, key=lambda record: (record["failure"]["follows"], record["seconds"]))
            return RanksFailed(Failure(**first["failure"]), first["is_told"], exit_code)
        signal_name = error.signal_name if isinstance(error, ProcessExitedException) else None
        how = f"was killed by {signal_name}" if signal_name else f"ended with exit code {exit_code or ExitCode.FAILED}"
        cluster, devices = self._strategy.cluster_environment, self._strategy.parallel_devices
        assert cluster is not None
        assert devices is not None
        rank = cluster.node_rank() * len(devices) + error.error_index
        line = f"rank {rank} on {node_name()} failed: process {error.error_pid} {how}"
        details = "" if isinstance(error, ProcessExitedException) else error.msg  # the record could not be written
        return RanksFailed(Failure(line, details), False, exit_code)


def with_word(trainer: Trainer) -> Trainer:
    """Whose launcher says a word of ranks that fail."""
    launcher = trainer.strategy.launcher
    if type(launcher) is _SubprocessScriptLauncher:
        scripts = Scripts(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
        patches.replace(trainer.strategy, "_launcher", scripts)
    elif type(launcher) is _MultiProcessingLauncher:
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it ends the others, which we say
        patches.replace(trainer.strategy, "_launcher", Workers(launcher._strategy, launcher._start_method))
    return trainer
