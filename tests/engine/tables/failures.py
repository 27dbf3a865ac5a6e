"""What a user sees of each failure under each launcher: real runs of two processes.

python -m tests.engine.tables.failures          # needs what the tests of Slurm need: CONTRIBUTING.md
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.engine.conftest import CHECKOUT, PLAIN_DATA, PLAIN_MODEL
from tests.engine.failures.failing import FAILING_MODEL
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import Job, submit
from tests.engine.tables import documents

ALL = ("python", "torchrun", "Slurm")


@dataclass(frozen=True)
class Case:
    """
    Args:
        fault: what is done to the run from outside, once it trains.
    """

    arguments: tuple[str, ...]
    launchers: tuple[str, ...] = ALL
    fault: str = ""


def in_model(how: str, *arguments: str) -> tuple[str, ...]:
    model = (FAILING_MODEL, f"model.how={how!r}")
    return *model, PLAIN_DATA, *arguments


def in_data(how: str) -> tuple[str, ...]:
    return (PLAIN_MODEL, "data._target_=tests.engine.failures.failing.FailingData", f"data.how={how!r}")


SLOW = in_model("nothing", "model.step_seconds=0.1", "trainer.log_every_n_steps=2")
CASES = {
    "an exception in rank 1": Case(in_model("raises")),
    "`kill -9` of rank 1": Case(in_model("is killed")),
    "rank 1 runs out of memory": Case(in_model("runs out of memory")),
    "rank 1 hangs (given up after 5 s)": Case(in_model("hangs", "watch.hung_after_seconds=5")),
    "the disk of rank 1 is full when it saves": Case(
        in_model("may write no more", "callbacks.last_checkpoint.every_n_steps=4", "trainer.max_steps=40")
    ),
    "an exception before the ranks meet": Case(in_data("raises")),
    "`kill -9` before the ranks meet": Case(in_data("is killed")),
    "Ctrl+C, or `scancel --signal=INT`": Case(SLOW, fault="interrupt"),
    "twice, in a step that does not end": Case(in_model("hangs", "model.rank=0"), fault="interrupt twice"),
    "the node of rank 1 crashes": Case(SLOW, ("Slurm",), "crash"),
    "the node of rank 1 is cut off (given up after 10 s)": Case(SLOW, ("Slurm",), "cut"),
    "the node of rank 1 is cut off, and comes back after 15 s": Case(SLOW, ("Slurm",), "cut for a while"),
}
RUN = (*("trainer.accelerator=cpu", "trainer.max_steps=1000", "name=failing"), "watch.lost_after_seconds=10")
TRAIN = (sys.executable, str(CHECKOUT / "train.py"))
LAUNCHERS = {
    "python": (*TRAIN, "strategy=ddp", "trainer.devices=2"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", TRAIN[1], "strategy=ddp"),
}

# torchrun's warnings, which TORCH_LOGS=-torch.distributed.elastic silences, and NCCL's words about a peer that is gone
OF_LIBRARIES = re.compile(
    r"W\d{4} |\[rank\d+\]:\[|nccl\w+Error|Last error|socket\w+: |Exception raised|frame #|#\d+ |$"
)


@dataclass(frozen=True)
class Cell:
    seconds: float  # from the failure until no process is left
    code: str
    line: str  # the first that the user reads

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s, {self.code}: {self.line}"


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, as its children do
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        cells = {
            (name, launcher): pool.submit(local, case, LAUNCHERS[launcher], Path(folder, f"{launcher}{number}"))
            for number, (name, case) in enumerate(CASES.items())
            for launcher in LAUNCHERS
            if launcher in case.launchers
        }
        done = {key: cell.result() for key, cell in cells.items()}
        with Cluster(nodes=4) as cluster:
            for number, (name, case) in enumerate(CASES.items()):
                done[name, "Slurm"] = _on_slurm(cluster, case, Path(folder, f"slurm{number}"))
    for group in Path("/sys/fs/cgroup/memory").glob("failing_*"):
        group.rmdir()
    documents.put("failures", list(_document(done)))


def local(case: Case, command: tuple[str, ...], folder: Path, seconds: float = 300) -> Cell:
    folder.mkdir()
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CELL": folder.name}
        process = subprocess.Popen(
            [*command, *RUN, *case.arguments], cwd=folder, env=environ, stdout=out, stderr=err, start_new_session=True
        )
        if case.fault:
            _wait_until_it_trains(folder)
            for _ in range(1 + case.fault.endswith("twice")):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                time.sleep(2)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return _seen(folder, str(code), time.time())


def _on_slurm(cluster: Cluster, case: Case, folder: Path) -> Cell:
    folder.mkdir()
    for name in ("train.py", "conf", "slurm"):
        (folder / name).symlink_to(CHECKOUT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    os.environ |= {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "CELL": folder.name}
    script = CHECKOUT / "slurm/multinode.sh"
    options = {"nodes": 2, "ntasks_per_node": 1, "nodelist": "node[1-2]", "no_requeue": True}
    options |= {"output": str(folder / "out"), "error": str(folder / "err")}
    job = submit(cluster, script, *RUN, "strategy=ddp", *case.arguments, cwd=folder, **options)
    if case.fault:
        _wait_until_it_trains(folder)
        _strike(cluster, job, case.fault)
    state = job.wait(300)
    code = job.details()["ExitCode"].partition(":")[0]
    cell = _seen(folder, code if state == "FAILED" else state, time.time())  # none of a job whose node has failed
    if case.fault == "crash":
        cluster.boot(2)
    if case.fault == "cut":
        cluster.mend(2)
    while cluster.idle_nodes() < 4:
        time.sleep(0.2)
    return cell


def _strike(cluster: Cluster, job: Job, fault: str) -> None:
    if fault.startswith("interrupt"):
        for _ in range(1 + fault.endswith("twice")):
            cluster.run("scancel", "--signal=INT", job.id)
            time.sleep(2)
    elif fault == "crash":
        cluster.crash(2)
    else:
        cluster.cut(2)
        if fault == "cut for a while":
            time.sleep(15)
            cluster.mend(2)


def _wait_until_it_trains(folder: Path) -> None:
    out, failed = folder / "out", folder / "failed_0"
    while not ((out.exists() and "\nstep " in out.read_text()) or list(folder.glob("failed_*"))):
        time.sleep(0.1)
    for path in folder.glob("failed_*"):
        path.unlink()
    failed.write_text(str(time.time()))


def _seen(folder: Path, code: str, ended: float) -> Cell:
    while _left(folder.name):
        ended = time.time()
        time.sleep(0.1)
    failed = min(float(path.read_text()) for path in folder.glob("failed_*"))
    told = [*(folder / "err").read_text().splitlines(), *(folder / "out").read_text().splitlines()[-2:]]
    line = (
        next(line for line in told if not OF_LIBRARIES.match(line))
        .replace(socket.gethostname(), "node")
        .replace(f"{CHECKOUT}/", "")
        .strip()
    )
    cell = Cell(ended - failed, code, line)
    print(folder.name, cell, flush=True)
    return cell


def _left(cell: str) -> list[psutil.Process]:
    def marked(process: psutil.Process) -> bool:
        try:
            return process.environ().get("CELL") == cell and process.pid != os.getpid()
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if marked(process)]


def _document(done: dict[tuple[str, str], Cell]) -> Iterator[str]:
    yield documents.made("python -m tests.engine.tables.failures")
    yield ""
    rows = [
        [case, launcher, f"{cell.seconds:.0f}", cell.code, f"`{cell.line}`"]
        for case in CASES
        for launcher in (*LAUNCHERS, "Slurm")
        if (cell := done.get((case, launcher)))
    ]
    head = ["what happens", "started by", "seconds until all is gone", "exit code", "the first line"]
    yield from documents.markdown(head, rows)


if __name__ == "__main__":
    main()
