"""The launcher of a plain `python train.py`, which starts its ranks and reports failures that no watchdog sees yet."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightswitch.config.overrides import quoted
from lightswitch.context import RunContext
from lightswitch.errors import ExitCode, Refused
from lightswitch.failures.classify import node_name
from lightswitch.hooked_strategy import HookedStrategy
from lightswitch.process import stopped_with

_SIGNAL_SECONDS = 2  # for a signal that ended another rank to arrive here, even if this rank is in C code


class Scripts(_SubprocessScriptLauncher):
    """Lightning's script launcher without its observer, which silently kills this process when a rank fails."""

    def __init__(self, cluster: ClusterEnvironment, num_processes: int, num_nodes: int, run: RunContext) -> None:
        super().__init__(cluster, num_processes, num_nodes)
        self.run = run

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        if not self.run.placement.is_external:  # else preflight has compared them; each node may have its own number
            self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not (self.cluster_environment.creates_processes_externally or self.procs):  # a test has those of the fit
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
        command = [sys.executable, *sys.argv, *self.run.process.decided, *own]  # entry.py has made the path absolute
        for local_rank in range(1, self.num_processes):
            environment = {**os.environ, "LOCAL_RANK": str(local_rank)}
            environment.pop("RANK", None)  # so that it is a rank of this process, see placement.is_child
            # where this process began: the user's code may have changed its working directory
            process = subprocess.Popen(command, env=environment, cwd=self.run.hydra.runtime.cwd)
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


def install_launcher(strategy: HookedStrategy, run: RunContext) -> None:
    """Replace Lightning's launcher by one of the same kind that reports which rank failed.

    Raises:
        Refused: the strategy would start its ranks as Python functions.
    """
    launcher = strategy.launcher
    if isinstance(launcher, _MultiProcessingLauncher):
        raise Refused(
            f"start_method={launcher._start_method} of the strategy starts ranks as functions of this process; leave "
            "it out, and each rank starts by the command of the run"
        )
    if type(launcher) is _SubprocessScriptLauncher:
        cluster = launcher.cluster_environment
        strategy.ranks_launcher = Scripts(cluster, launcher.num_processes, launcher.num_nodes, run)
