"""Launchers for a plain `python train.py`, which start its ranks and report failures that the watchdog cannot see."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import PicklingError
from tempfile import TemporaryDirectory
from typing import Any, Literal

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException

from lightswitch import regular_files
from lightswitch.config.overrides import quoted
from lightswitch.context import RunContext
from lightswitch.errors import Ended, ExitCode, Failure, RanksFailed, Refused, Stopped
from lightswitch.failures import classify
from lightswitch.failures.classify import node_name
from lightswitch.failures.watchdog import Watchdog
from lightswitch.hooked_strategy import HookedStrategy
from lightswitch.mixins import callbacks_of
from lightswitch.process import Process, ended_by, stopped_with
from lightswitch.runs import log as run_log

_SIGNAL_SECONDS = 2  # for a signal that ended another rank to arrive here, even if this rank is in C code
StartMethod = Literal["spawn", "fork", "forkserver"]


class Scripts(_SubprocessScriptLauncher):
    """Lightning's script launcher without its observer, which silently kills this process when a rank fails."""

    def __init__(self, cluster: ClusterEnvironment, num_processes: int, num_nodes: int, run: RunContext) -> None:
        super().__init__(cluster, num_processes, num_nodes)
        self.run = run

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=self._observe, name="ranks", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        """Start this command for each of the node's other ranks, as Lightning does, but in this run's directory."""
        self._check_can_spawn_children()
        cluster, world_size = self.cluster_environment, self.num_processes * self.num_nodes
        os.environ.update(MASTER_ADDR=cluster.main_address, MASTER_PORT=str(cluster.main_port))
        os.environ.update(WORLD_SIZE=str(world_size), NODE_RANK=str(cluster.node_rank()))
        os.environ["LOCAL_RANK"] = str(cluster.local_rank())
        run_dir = quoted(str(self.run.run_dir))
        own = [f"run_id={self.run.run_id}", f"hydra.run.dir={run_dir}", "hydra.output_subdir=null"]
        command = [sys.executable, *_script(), *sys.argv[1:], *self.run.process.decided, *own]
        for local_rank in range(1, self.num_processes):
            environment = {**os.environ, "LOCAL_RANK": str(local_rank)}
            process = subprocess.Popen(command, env=environment)
            self.procs.append(process)
            self.run.process.ranks.append(process)  # at once, for a signal that arrives before the last has started

    def _observe(self) -> None:
        while not self.run.process.is_watched.wait(0.2):
            if self.run.signals.received is not None:  # this process ends by that signal, and has signalled its ranks
                return
            for local_rank, process in enumerate(self.procs, start=1):
                if code := process.poll():
                    rank = self.cluster_environment.node_rank() * self.num_processes + local_rank
                    self._end_with(rank, process.pid, code)

    def _end_with(self, rank: int, pid: int, code: int) -> None:
        process = self.run.process
        if stopped := stopped_with(code):
            time.sleep(_SIGNAL_SECONDS)
            if self.run.signals.received is None and not process.is_watched.is_set():
                os.kill(os.getpid(), stopped.by)  # this process passes it on to its other ranks
            return
        if code < 0:  # otherwise the rank has printed its error
            line = f"rank {rank} on {node_name()} failed: process {pid} {process.how_ended(pid)} before training began"
            process.note_failure(line)
            print(line, file=sys.stderr, flush=True)
        process.leave_now(ExitCode.REFUSED if code == ExitCode.REFUSED else ExitCode.FAILED)


def _script() -> list[str]:
    module = sys.modules["__main__"].__spec__  # None unless started by `python -m`
    return [os.path.abspath(sys.argv[0])] if module is None else ["-m", module.name]


class Workers(_MultiProcessingLauncher):
    """Lightning's multiprocessing launcher, with ranks that report their failures.

    torch passes on only the text of a traceback, so a failing rank also writes its `Failure` to a file, which this
    process, its parent, reads.
    """

    def __init__(self, strategy: ParallelStrategy, start_method: StartMethod, process: Process) -> None:
        super().__init__(strategy, start_method)
        self._process = process

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the ranks, and run the function in each of them.

        Raises:
            RanksFailed: a rank failed.
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
        self._process.steps_have_begun.set()
        return results

    def _unsendable(self, trainer: Trainer | None) -> Refused | None:
        """Return why the model or the data cannot be pickled; None if they can, or if the ranks have started."""
        if self._start_method == "fork" or self.procs or trainer is None:
            return None
        owners = {"model": trainer.lightning_module, "data": getattr(trainer, "datamodule", None)}
        found = first_unpicklable({name: owner for name, owner in owners.items() if owner})
        if found is None:
            return None
        return Refused(
            f"{found}, which can't be sent to the processes that strategy=ddp_{self._start_method} starts; use "
            "strategy=ddp, which builds the model in each"
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
        self._process.end_with_parent()
        if self._already_fit:  # in other processes, by an earlier launch
            self._process.steps_have_begun.set()
        if self._start_method != "fork" and trainer is not None:
            _unshare(trainer.lightning_module)
        try:
            classify.keep_disk_errors_of_threads(self._process)
            super()._wrapping_function(process_idx, trainer, function, args, kwargs, *rest)
            self._process.raise_disk_error()
        except (Stopped, Ended):
            raise
        except BaseException as error:
            assert trainer is not None
            watchdog = next(callback for callback in callbacks_of(trainer) if isinstance(callback, Watchdog))
            first = watchdog.failure(error, trainer)
            self._leave_record(process_idx, first)
            self._process.leave_now(first.exit_code)  # torch would report the error again

    def _leave_record(self, process_idx: int, failure: Failure) -> None:
        record = {"failure": asdict(failure), "is_reported": self._process.has_failed.is_set(), "seconds": time.time()}
        regular_files.write_json(self._records / f"{process_idx}.json", record)

    def _failed(self, error: ProcessException) -> RanksFailed:
        exit_code = error.exit_code if isinstance(error, ProcessExitedException) else None
        records = [json.loads(path.read_text()) for path in self._records.glob("*.json")]
        if records:
            first = min(records, key=lambda record: (record["failure"]["follows"], record["seconds"]))
            return RanksFailed(Failure(**first["failure"]), first["is_reported"], exit_code)
        cluster, devices = self._strategy.cluster_environment, self._strategy.parallel_devices
        assert cluster is not None
        assert devices is not None
        rank = cluster.node_rank() * len(devices) + error.error_index
        how = ended_by(exit_code or ExitCode.FAILED)
        line = f"rank {rank} on {node_name()} failed: process {error.error_pid} {how}"
        details = "" if isinstance(error, ProcessExitedException) else error.msg  # the rank could not write its record
        return RanksFailed(Failure(line, details), False, exit_code)


def _unshare(module: nn.Module) -> None:
    """Copy shared tensors that are neither parameters nor buffers, such as metric states, to this process's memory.

    torch sends tensors to a process in shared memory, so ranks would update one another's metrics. Lightning copies
    only parameters and buffers.
    """
    for part in module.modules():
        tensors = {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}
        shared = {name: value for name, value in tensors.items() if value.is_shared()}  # type: ignore[no-untyped-call]  # torch has no types for it
        vars(part).update({name: value.clone() for name, value in shared.items()})


def install_launcher(strategy: HookedStrategy, run: RunContext) -> None:
    """Replace Lightning's launcher by one of the same kind that reports which rank failed."""
    launcher = strategy.launcher
    if type(launcher) is _SubprocessScriptLauncher:
        cluster = launcher.cluster_environment
        strategy.ranks_launcher = Scripts(cluster, launcher.num_processes, launcher.num_nodes, run)
    elif type(launcher) is _MultiProcessingLauncher:
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it warns that it ends other ranks
        strategy.ranks_launcher = Workers(launcher._strategy, launcher._start_method, run.process)


def first_unpicklable(owners: dict[str, object]) -> str | None:
    """Return the path of the first value that can't be pickled, and the reason; None if all can.

    Args:
        owners: objects by name; for an nn.Module, the attributes of every submodule are checked.
    """
    for name, owner in owners.items():
        if _reason(owner) is None:  # its __getstate__ may leave out what can't be pickled
            continue
        for path, value in _parts_of(name, owner):
            if (reason := _reason(value)) is not None:
                return f"{path} is {_kind(value)}" if isinstance(value, types.FunctionType) else f"{path}: {reason}"
    return None


def _parts_of(name: str, owner: object) -> Iterator[tuple[str, Any]]:
    parts = owner.named_modules(prefix=name) if isinstance(owner, nn.Module) else [(name, owner)]
    for path, part in parts:
        yield path, type(part)
        for attribute, value in vars(part).items():
            if attribute not in ("_modules", "_trainer", "trainer"):  # checked separately, or not sent
                yield f"{path}.{attribute}", value


def _reason(value: object) -> str | None:
    try:
        ForkingPickler.dumps(value)
    except Exception as error:  # pickling a user's class can raise anything
        return str(error).partition("\n")[0] or type(error).__name__
    return None


def _kind(function: types.FunctionType) -> str:
    return "a lambda" if function.__name__ == "<lambda>" else f"a nested function, {function.__qualname__}"
