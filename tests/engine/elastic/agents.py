"""torchrun's agents on machines that come and go, and the one run that they train."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import lightning.pytorch as pl
import psutil

from lightswitch.runs import resume
from tests.engine.conftest import CHECKOUT, PLAIN, Finished
from tests.engine.processes import TRAIN_PY
from tests.engine.slurm.cluster import Cluster

RUN = (
    *(*PLAIN, "run_id=mine", "logger=csv", "~callbacks.lr_monitor", "trainer.accelerator=cpu"),
    *("global_batch_size=24", "trainer.log_every_n_steps=1", "callbacks.last_checkpoint.every_n_steps=10"),
    *("trainer.val_check_interval=100", "watch.lost_after_seconds=20"),  # machines stand still for some seconds
    *("model.lr=0.001", "callbacks.record._target_=tests.engine.plain.Record", "callbacks.record.folder=."),
)
PACE = ("callbacks.pace._target_=tests.engine.elastic.agents.UntilTold", "callbacks.pace.seconds=0.25")
# seconds: a node is lost after 20 without a sign of life, and others are waited for 1 once there are enough
RDZV_CONF = "join_timeout=900,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=20"
WAIT_SECONDS = 1200  # a machine that is shared may take a minute to start each node
MOMENTS, LAST_STEP, HOLD = "moments.jsonl", "last_step", "hold"
NEVER = 100_000


class UntilTold(pl.Callback):
    """Takes its time for each step until a file says which is the last; notes when rank 0 came to its first one.

    Stands still before a step, as long as a file says so.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.moments = {"created": psutil.Process().create_time(), "built": time.time()}

    def on_train_start(self, *_: Any) -> None:
        self.moments["started"] = time.time()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.moments and trainer.is_global_zero:
            with Path(MOMENTS).open("a") as file:
                file.write(json.dumps({**self.moments, "stepped": time.time()}) + "\n")
        self.moments = {}
        trainer.should_stop = trainer.global_step >= self._last_step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._last_step == NEVER:
            time.sleep(self.seconds)
        while self._held_step == trainer.global_step:
            time.sleep(0.05)

    @property
    def _held_step(self) -> int:
        with contextlib.suppress(OSError):
            return int(Path(HOLD).read_text())
        return NEVER

    @property
    def _last_step(self) -> int:
        return int(Path(LAST_STEP).read_text()) if Path(LAST_STEP).exists() else NEVER


class Agents:
    """Agents of one run, a node each; the store by which they meet is the head's, and outlives any of them."""

    def __init__(
        self,
        machines: Machines,
        folder: Path,
        python: Path,
        strategy: str = "ddp",
        processes: int = 1,
        *words: str,
    ) -> None:
        """Args:

        processes: of each node.
        """
        self.machines, self.folder, self.python = machines, folder, python
        self.strategy, self.processes, self.words = strategy, processes, words
        self.alive: dict[int, subprocess.Popen[bytes]] = {}
        self._leaving: dict[int, subprocess.Popen[bytes]] = {}
        self.environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "CUDA_VISIBLE_DEVICES": ""}
        serve = "import time, torch.distributed as dist; "
        serve += "store = dist.TCPStore('0.0.0.0', 29500, is_master=True, wait_for_workers=False); time.sleep(1e6)"
        self._store = machines.start(0, str(python), "-c", serve, cwd=folder, output=folder / "store.log")

    def join(self, *nodes: int, nnodes: str = "1:4", conf: str = RDZV_CONF) -> None:
        torchrun = (
            str(self.python),
            "-m",
            "torch.distributed.run",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=head:29500",
        )
        torchrun += (f"--nnodes={nnodes}", "--rdzv-id=mine", "--max-restarts=500")
        run = (*RUN, *PACE, *self.words, f"strategy={self.strategy}", f"trainer.max_steps={NEVER}")
        for node in nodes:
            if node in self._leaving:
                self._leaving.pop(node).wait(WAIT_SECONDS)
            self.alive[node] = self.machines.start(
                *(node, *torchrun, f"--nproc-per-node={self.processes}", f"--rdzv-conf={conf}", TRAIN_PY, *run),
                cwd=self.folder, output=self.folder / f"node{node}.log", **self.environment,
            )  # fmt: skip

    def lose(self, *nodes: int) -> None:
        """Have nodes fail with all that runs there, and come up again with nothing."""
        for node in nodes:
            self.machines.crash(node)
            self.alive.pop(node).wait()
        for node in nodes:
            self.machines.boot(node)

    def leave(self, node: int) -> None:
        """Give a node notice that it is to end, as a scheduler does."""
        agent = self.alive.pop(node)  # of nsenter, which has forked the agent into the node's namespaces
        psutil.Process(agent.pid).children()[0].terminate()
        self._leaving[node] = agent

    def orphan(self, node: int) -> None:
        """Kill an agent alone."""
        agent = self.alive.pop(node)
        psutil.Process(agent.pid).children()[0].kill()
        self._leaving[node] = agent

    def finish(self) -> Finished:
        """Let the run end some steps from now, and return it."""
        told = self.folder / "told"
        told.write_text(str(self.step + 200))  # more than any rank can have begun, also where this process stands still
        told.replace(self.folder / LAST_STEP)
        self.until(lambda: all(agent.poll() is not None for agent in self.alive.values()))
        codes = [agent.returncode for agent in self.alive.values()]
        finished = Finished(max(codes), self.output(), "", self.folder, "mine")
        assert finished.returncode == 0, finished.out
        return finished

    @property
    def alone(self) -> tuple[str, ...]:
        """The words of the same run without agents, once it has ended."""
        return (*RUN, "strategy=single", f"trainer.max_steps={(self.folder / LAST_STEP).read_text()}")

    def until_trains_on(self, *nodes: int) -> None:
        """Wait until a start on these nodes has trained a few steps."""
        hosts = sorted(f"node{node}" for node in nodes)
        self.until(lambda: bool(self.starts) and sorted(self.starts[-1].hosts) == hosts)
        wanted = self.starts[-1].step + 3
        self.until(lambda: self.step >= wanted)

    def workers(self, node: int) -> list[psutil.Process]:
        """Return the processes on a node that train."""
        every = psutil.Process(self.alive[node].pid).children(recursive=True)
        return [one for one in every if TRAIN_PY in one.cmdline() and "torch.distributed.run" not in one.cmdline()]

    def moments(self) -> list[dict[str, float]]:
        """Return when each start was created, built, started and at its first step, in seconds since 1970."""
        path = self.folder / MOMENTS
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def starts(self) -> list[resume.Start]:
        return resume.starts(self.folder / "runs/plainmodel/mine")

    @property
    def step(self) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError):
            rows = (self.folder / "runs/plainmodel/mine/metrics.csv").read_text().splitlines()
            return int(rows[-1].partition(",")[0])
        return -1

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not is_so():
            assert time.monotonic() < end, self.output()
            time.sleep(0.1)

    def output(self) -> str:
        return "\n".join(self._outputs())

    def _outputs(self) -> Iterator[str]:
        for path in sorted(self.folder.glob("node*.log")):
            yield f"{path.stem}:\n{path.read_text()}"

    def change(self, draw: Random, nodes: Sequence[int], most: int, among: int) -> list[str]:
        """Have nodes leave and join, each at its own moment, as drawn; wait until the rest has gone on.

        Nodes leave within half a second of one another, before the rest has begun to start again: a node that is lost
        while the others wait for it at their start is waited for as long as `meet_timeout_seconds` says. They join
        within two seconds, into a run that trains, stops, meets or starts.

        Args:
            nodes: that there are.
            most: that train at once.
            among: how many nodes change at most.

        Returns:
            What each change was.
        """
        alive, away = sorted(self.alive), [node for node in nodes if node not in self.alive]
        draw.shuffle(alive)
        draw.shuffle(away)
        while True:  # until two nodes or more change, and not too many train
            leaving, joining = alive[: draw.randrange(len(alive))], away[: draw.randint(0, len(away))]
            stay = len(alive) - len(leaving)
            if min(2, among) <= len(leaving) + len(joining) <= among and stay + len(joining) <= most:
                break
        changes = [(draw.uniform(0, 0.5), draw.choice(("lose", "leave", "orphan")), node) for node in leaving]
        changes += [(draw.uniform(0, 2), "join", node) for node in joining]
        self.until(lambda: self.step > 10)  # there is a checkpoint
        known = len(self.starts)
        time.sleep(draw.uniform(0, 1))
        began = time.monotonic()
        for moment, way, node in sorted(changes):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            getattr(self, way)(node)
        self.until(lambda: len(self.starts) > known)
        self.until_trains_on(*self.alive)
        return [f"{way} {node} after {moment:.1f} s" for moment, way, node in sorted(changes)]

    def end(self) -> None:
        for agent in (*self.alive.values(), *self._leaving.values(), self._store):
            agent.kill()
            agent.wait()


# Machines with network and processes of their own, without a scheduler: where torchrun's agents live and die


PROGRAMS = ("ip", "mount", "nsenter", "setpriv", "unshare")


class Machines(Cluster):
    """Running machines: head, which trains nothing, and node1, node2, …, wired as those of a Slurm cluster are."""

    head_script = Cluster.head_script.partition("munged")[0] + "touch up\nexec sleep infinity\n"
    node_script = Cluster.node_script.partition("exec slurmd")[0] + "touch up{node}\nexec sleep infinity\n"

    def start(self, node: int, *command: str, cwd: Path, output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on a node, or on the head, which is number 0."""
        target = self.first_pids[f"node{node}" if node else "head"]
        inside = ["nsenter", f"--target={target}", "--all", f"--wdns={cwd}"]
        paths = f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}"
        environ = {name: os.environ[name] for name in ("PATH", "HOME")} | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        with output.open("ab") as file:
            return subprocess.Popen(
                [*inside, *command], env=environ | environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def _is_up(self) -> bool:
        return all((self.root / f"up{node}").exists() for node in self.nodes)

    def _head_answers(self) -> bool:
        return (self.root / "up").exists()
