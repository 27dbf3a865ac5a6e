"""Runs of train.py as a user starts them, forked from a process that has imported torch already."""

from __future__ import annotations

import contextlib
import csv
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from lightswitch.cluster.environments import reserve_port

CHECKOUT = Path(__file__).parents[1]
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background, whose jobs hand that on
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"  # a few processes share two cores; and sums in another order differ in a bit
torch.set_num_threads(1)

GPUS = torch.cuda.device_count()
_VISIBLE = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preload"])


@dataclass(frozen=True)
class Finished:
    returncode: int
    out: str
    err: str
    folder: Path  # the working directory it ran in
    run_id: str = "*"

    @property
    def run_dir(self) -> Path:
        (found,) = self.folder.glob(f"runs/*/{self.run_id}")
        return found

    @property
    def refusal(self) -> str:
        """The one line of error that it was refused with."""
        assert self.returncode == 2, self.err
        assert "Traceback" not in self.err
        (line,) = (line for line in self.err.splitlines() if line.startswith("error: "))
        return line.removeprefix("error: ")

    def metrics(self) -> list[dict[str, str]]:
        with (self.run_dir / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    def column(self, name: str) -> dict[int, float]:
        """Values by step, of which there must be some: two empty columns would be alike, and say nothing."""
        found = {int(row["step"]): float(row[name]) for row in self.metrics() if row.get(name)}
        assert found, f"{self.run_dir}/metrics.csv has no {name}"
        return found


Train = Callable[..., Finished]

TIMEOUT_SECONDS = 800  # bounds a hang; on a quiet machine, no run takes a minute
_SETTLE_SECONDS = 60  # for the other ranks, once one has failed: they say what they know of it, and end by themselves


def skip_without_gpus(items: Iterable[pytest.Item]) -> None:
    """Skip tests marked `gpu`, or `gpu(2)`, where fewer devices are here."""
    for item in items:
        if (marker := item.get_closest_marker("gpu")) and (needed := marker.args[0] if marker.args else 1) > GPUS:
            item.add_marker(pytest.mark.skip(reason=f"it needs {needed} CUDA devices, and {GPUS} are here"))


@pytest.fixture(autouse=True, scope="session")
def no_gpus() -> None:
    """A test that names no device means the CPU: no GPU is seen but by those marked gpu, and what they start."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True)
def environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """As it was, after each test: Lightning leaves where ranks meet in it, and two jobs that inherit that would mix."""
    before = dict(os.environ)
    if request.node.get_closest_marker("gpu"):
        del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ.update(_VISIBLE)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    return runs_in(tmp_path)


def runs_in(tmp_path: Path, python: Path = Path(sys.executable), each_a_node: bool = False) -> Train:
    """`train("strategy=fsdp", ranks=2)` in a folder of its own; ``folder=`` runs again where an earlier one ran.

    With ``ranks=``, so many processes are started as torchrun would start them, which is faster than by script. To
    ``meanwhile=`` they are handed while they run. What a run starts by script, it starts by ``python``. With
    ``each_a_node``, every rank is the only one of a node.
    """
    count = 0

    def run(
        *arguments: str,
        ranks: int = 0,
        environment: Mapping[str, str] = MappingProxyType({}),
        folder: Path | None = None,
        timeout_seconds: int = TIMEOUT_SECONDS,
        check: bool = True,
        meanwhile: Callable[[list[multiprocessing.process.BaseProcess]], None] = lambda processes: None,
    ) -> Finished:
        nonlocal count
        count += 1
        folder = folder or tmp_path / str(count)
        folder.mkdir(exist_ok=True)
        written = [tmp_path / f"{count}.{rank}" for rank in range(max(1, ranks))]
        for path, stream in itertools.product(written, ("out", "err")):
            Path(f"{path}.{stream}").touch()  # a process may be ended before it writes anything
        visible = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
        with as_torchrun(ranks, tmp_path.name + str(count), each_a_node) as environments:
            every = [{**visible, **environment, **own} for own in environments or [{}]]
            processes = [
                context.Process(target=_train, args=(arguments, folder, path, own, python))
                for path, own in zip(written, every, strict=True)
            ]
            codes = _run(processes, timeout_seconds, meanwhile)
        out, err = ("".join(Path(f"{path}.{stream}").read_text() for path in written) for stream in ("out", "err"))
        finished = Finished(next((code for code in codes if code), 0), out, err, folder)
        if check:
            assert finished.returncode == 0, f"{' '.join(arguments)}\n{finished.out}\n{finished.err}"
        return finished

    return run


def once(*arguments: str, **options: Any) -> Any:
    """Return a fixture: a run of train.py that all tests of a module share."""

    @pytest.fixture(scope="module")
    def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
        return runs_in(tmp_path_factory.mktemp("once"))(*arguments, **options)

    return finished


@contextlib.contextmanager
def as_torchrun(ranks: int, run_id: str, each_a_node: bool = False) -> Iterator[list[dict[str, str]]]:
    """What torchrun tells each rank of a node; or, of nodes of one device each, which then is the same one.

    NCCL knows two ranks of one card by the host and the bus, and refuses them: it is told of other hosts.
    """
    with reserve_port() as held:
        common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(held.getsockname()[1]), "TORCHELASTIC_RUN_ID": run_id}
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        if each_a_node:
            common |= {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": str(ranks), "NCCL_SOCKET_IFNAME": "lo"}
            own = [{"LOCAL_RANK": "0", "GROUP_RANK": str(rank), "NCCL_HOSTID": str(rank)} for rank in range(ranks)]
        else:
            own = [{"LOCAL_RANK": str(rank)} for rank in range(ranks)]
        yield [{**common, "RANK": str(rank), **each} for rank, each in enumerate(own)]


def _run(
    processes: list[multiprocessing.process.BaseProcess],
    timeout_seconds: int,
    meanwhile: Callable[[list[multiprocessing.process.BaseProcess]], None],
) -> list[int]:
    """Exit codes; where one fails the others, which may wait for it, are ended."""
    for process in processes:
        process.start()
    meanwhile(processes)
    end = time.monotonic() + timeout_seconds
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        multiprocessing.connection.wait([p.sentinel for p in processes if p.is_alive()], 5)
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + _SETTLE_SECONDS)
    for process in processes:
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return [process.exitcode for process in processes]


def _train(arguments: tuple[str, ...], folder: Path, written: Path, environment: dict[str, str], python: Path) -> None:
    multiprocessing.set_start_method("fork", force=True)  # as elsewhere: its loader workers need no server of their own
    os.setsid()  # so that a time-out ends the processes it has started, too
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        path = f"{written}.{'out' if number == 1 else 'err'}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # that of the test which started the fork server
    os.environ.update(environment)
    os.environ.setdefault("PYTHONHASHSEED", "0")  # train.py would start itself again, without what is imported here
    sys.path[:0] = [str(CHECKOUT), str(folder)]
    sys.argv = [str(CHECKOUT / "train.py"), *arguments]
    sys.executable = str(python)
    sys.orig_argv = [sys.executable, *sys.argv]
    runpy.run_path(sys.argv[0], run_name="__main__")


def largest_difference(found: Finished, expected: Finished, metric: str = "train/loss") -> float:
    """Of the two curves, which have the same steps, at any of them."""
    a, b = found.column(metric), expected.column(metric)
    assert a.keys() == b.keys(), metric
    return max(abs(a[step] - b[step]) for step in b)


def predictions(run: Finished) -> torch.Tensor:
    """In the order of the data, of all ranks."""
    files = sorted((run.run_dir / "predictions").glob("rank_*.pt"))
    return torch.cat([batch for file in files for batch in torch.load(file)])
