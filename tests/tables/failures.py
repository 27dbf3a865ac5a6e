"""What a user sees of each failure under each launcher: real runs of two processes.

python -m tests.tables.failures          # needs what the tests of Slurm need: docs/failures.md
"""

from __future__ import annotations

import os
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

from tests.conftest import CHECKOUT
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import submit
from tests.tables import documents

MODEL = "model._target_=tests.failing.FailingModel"
PLAIN = ("data._target_=tests.plain.PlainData",)
CASES = {
    "an exception in rank 1": (MODEL, "model.how=raises", *PLAIN),
    "`kill -9` of rank 1": (MODEL, "model.how='is killed'", *PLAIN),
    "rank 1 hangs (given up after 5 s)": (MODEL, "model.how=hangs", "watch.hung_after_seconds=5", *PLAIN),
    "an exception before the ranks meet": (
        *("model._target_=tests.plain.PlainModel", "data._target_=tests.failing.FailingData", "data.how=raises"),
    ),
}
FAULTS = {"the node of rank 1 crashes": "crash", "the node of rank 1 is cut off (given up after 10 s)": "cut"}
SLOW = (MODEL, "model.how=nothing", "model.step_seconds=0.1", *PLAIN, "trainer.log_every_n_steps=2")
RUN = (
    *("trainer.accelerator=cpu", "trainer.max_steps=1000", "name=failing"),
    "watch.lost_after_seconds=10",
)
TRAIN = (sys.executable, str(CHECKOUT / "train.py"))
LAUNCHERS = {
    "python": (*TRAIN, "strategy=ddp", "trainer.devices=2"),
    "ddp_spawn": (*TRAIN, "strategy=ddp_spawn", "trainer.devices=2"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", TRAIN[1], "strategy=ddp"),
}
ON_ITS_OWN = "FailingData"  # Python's own processes get their data from the one that starts them


@dataclass(frozen=True)
class Cell:
    seconds: float  # from the failure until no process is left
    code: str
    line: str  # the first that the user reads

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s, {self.code}: {self.line}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        cells = {
            (case, launcher): pool.submit(_local, arguments, LAUNCHERS[launcher], Path(folder, f"{launcher}{number}"))
            for number, (case, arguments) in enumerate(CASES.items())
            for launcher in LAUNCHERS
            if launcher != "ddp_spawn" or ON_ITS_OWN not in str(arguments)
        }
        done = {key: cell.result() for key, cell in cells.items()}
        with Cluster(nodes=4) as cluster:
            for number, (case, arguments) in enumerate(CASES.items()):
                done[case, "Slurm"] = _on_slurm(cluster, arguments, "", Path(folder, f"slurm{number}"))
            for case, fault in FAULTS.items():
                done[case, "Slurm"] = _on_slurm(cluster, SLOW, fault, Path(folder, fault))
    documents.put("failures.md", "failures", list(_document(done)))


def _local(arguments: tuple[str, ...], command: tuple[str, ...], folder: Path) -> Cell:
    folder.mkdir()
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        environ = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "CELL": folder.name}
        process = subprocess.Popen(
            [*command, *RUN, *arguments], cwd=folder, env=environ, stdout=out, stderr=err, start_new_session=True
        )
        code = process.wait(timeout=300)
    return _seen(folder, str(code), time.time())


def _on_slurm(cluster: Cluster, arguments: tuple[str, ...], fault: str, folder: Path) -> Cell:
    folder.mkdir()
    for name in ("train.py", "conf", "slurm"):
        (folder / name).symlink_to(CHECKOUT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    os.environ |= {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "CELL": folder.name}
    script = CHECKOUT / "slurm/multinode.sh"
    options = {
        "nodes": 2,
        "ntasks_per_node": 1,
        "nodelist": "node[1-2]",
        "error": str(folder / "err"),
        "no_requeue": True,
    }
    job = submit(cluster, script, *RUN, "strategy=ddp", *arguments, cwd=folder, **options)
    if fault:
        while "\nstep " not in job.output():
            time.sleep(0.1)
        (folder / "failed_").write_text(str(time.time()))
        getattr(cluster, fault)(2)
    job.wait(300)
    cell = _seen(folder, job.details()["ExitCode"].partition(":")[0], time.time())
    if fault == "crash":
        cluster.boot(2)
    if fault == "cut":
        cluster.mend(2)
    while cluster.idle_nodes() < 4:
        time.sleep(0.2)
    return cell


def _seen(folder: Path, code: str, ended: float) -> Cell:
    while _left(folder.name):
        ended = time.time()
        time.sleep(0.1)
    failed = min(float(path.read_text()) for path in folder.glob("failed_*"))
    line = (folder / "err").read_text().partition("\n")[0]
    line = line.replace(socket.gethostname(), "node").replace(f"{CHECKOUT}/", "")
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
    yield documents.made("python -m tests.tables.failures")
    yield ""
    rows = [
        [case, launcher, f"{cell.seconds:.0f}", cell.code, f"`{cell.line}`"]
        for case in (*CASES, *FAULTS)
        for launcher in (*LAUNCHERS, "Slurm")
        if (cell := done.get((case, launcher)))
    ]
    head = ["what happens", "started by", "seconds until all is gone", "exit code", "the first line"]
    yield from documents.markdown(head, rows)


if __name__ == "__main__":
    main()
