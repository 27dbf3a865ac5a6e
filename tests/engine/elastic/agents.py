"""torchrun's agents on machines that come and go, and the one run that they train."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil

from lightswitch.runs import starts
from tests.engine.conftest import PLAIN, Finished
from tests.engine.elastic.machines import Machines
from tests.engine.processes import TRAIN_PY

STEPS = 400
RUN = (
    *(*PLAIN, "run_id=mine", "logger=csv", "~callbacks.lr_monitor", "trainer.accelerator=cpu"),
    *("global_batch_size=24", "trainer.log_every_n_steps=1", "callbacks.last_checkpoint.every_n_steps=10"),
    *("trainer.val_check_interval=100", "watch.lost_after_seconds=10", f"trainer.max_steps={STEPS}"),
    *("model.lr=0.001", "callbacks.record._target_=tests.engine.plain.Record", "callbacks.record.folder=."),
)
PACE = ("callbacks.pace._target_=tests.engine.elastic.agents.UntilHurried", "callbacks.pace.seconds=0.25")
# seconds: a node is lost after 6 without a sign of life, and others are waited for 2 once there are enough
RDZV_CONF = "join_timeout=300,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=6"
WAIT_SECONDS = 240


class UntilHurried(pl.Callback):
    """Takes its time for each step until there is a file `hurry`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *_: Any) -> None:
        if not Path("hurry").exists():
            time.sleep(self.seconds)


class Agents:
    """Agents of one run, a node each; the store by which they meet is the head's, and outlives any of them."""

    def __init__(
        self, machines: Machines, folder: Path, python: Path, strategy: str = "ddp", processes: int = 1
    ) -> None:
        self.machines, self.folder, self.python = machines, folder, python
        self.strategy, self.processes = strategy, processes
        self.alive: dict[int, subprocess.Popen[bytes]] = {}
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
        torchrun += (f"--nnodes={nnodes}", f"--nproc-per-node={self.processes}", "--rdzv-id=mine", "--max-restarts=500")
        run = (*RUN, *PACE, f"strategy={self.strategy}")
        for node in nodes:
            self.alive[node] = self.machines.start(
                *(node, *torchrun, "--rdzv-id=mine", f"--rdzv-conf={conf}", TRAIN_PY, *run),
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
        agent.wait(WAIT_SECONDS)

    def hurry(self) -> Finished:
        """Let the run end, and return it."""
        (self.folder / "hurry").touch()
        self.until(lambda: all(agent.poll() is not None for agent in self.alive.values()))
        codes = [agent.returncode for agent in self.alive.values()]
        finished = Finished(max(codes), self.output(), "", self.folder, "mine")
        assert finished.returncode == 0, finished.out
        return finished

    def until_trains_on(self, *nodes: int) -> None:
        """Wait until a start on these nodes has trained a few steps."""
        hosts = sorted(f"node{node}" for node in nodes)
        self.until(lambda: bool(self.starts) and sorted(self.starts[-1].hosts) == hosts)
        wanted = self.starts[-1].step + 3
        self.until(lambda: self.step >= wanted)

    @property
    def starts(self) -> list[starts.Start]:
        return starts.read(self.folder / "runs/plainmodel/mine")

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

    def end(self) -> None:
        for agent in (*self.alive.values(), self._store):
            agent.kill()
            agent.wait()
