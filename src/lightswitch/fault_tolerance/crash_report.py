"""The crash report of a run, in its directory: the first failure, and what each rank knows."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
import time
from pathlib import Path

from lightswitch import versions
from lightswitch.cluster import variables
from lightswitch.context import RunContext
from lightswitch.errors import ExitCode, Failure
from lightswitch.fault_tolerance.failure import Rank
from lightswitch.fault_tolerance.stacks import all_stacks
from lightswitch.runs import log as run_log

_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
_PACKAGES = ("lightswitch", "torch", "lightning", "deepspeed", "numpy")


class CrashReport:
    """`crash/<time of the start>/`, of one start of the run; written only when it fails of a bug, or of a machine.

    For its owner's eyes alone.

    Attributes:
        logs: the run's log files, which one rank writes, and which are told of the failure by whichever tells it.
    """

    def __init__(self, run: RunContext) -> None:
        self.run = run
        handlers = run.hydra.job_logging.get("handlers") or {}
        self.logs = [Path(str(handler.filename)) for handler in handlers.values() if handler.get("filename")]
        if run.process.crash_folder is None:
            run.process.crash_folder = run.run_dir / "crash" / time.strftime("%Y-%m-%d_%H-%M-%S")

    @property
    def folder(self) -> Path:
        """One for all ranks, from the time they have met."""
        assert self.run.process.crash_folder is not None
        return self.run.process.crash_folder

    def tell(self, failure: Failure) -> int:
        """What the run failed of, to the user, once for all processes of the run; the exit code."""
        self.run.process.note_failure(failure.line)
        text = f"{failure.line}\n{failure.details}".rstrip() + "\n"
        try:
            self._write("failure.txt", text.encode(errors="backslashreplace"), os.O_EXCL)
            text += f"crash report: {os.path.relpath(self.folder)}\n"
        except FileExistsError:  # another process was first
            return failure.exit_code
        except OSError as error:  # a full disk, for one: several ranks may tell it then
            text += f"no crash report could be written: {error}\n"
        print(text, end="", file=sys.stderr, flush=True)
        self.log(text)
        return failure.exit_code

    @property
    def _is_of_earlier_run(self) -> bool:
        """The directory holds the record of a run, of an earlier start or this one."""
        return (self.folder.parent.parent / "config.yaml").exists()

    @property
    def is_told(self) -> bool:
        return self._first_failure.exists()

    def log_mistake(self, traceback: str) -> None:
        """A start that does not go on leaves the log of an earlier run as it was."""
        if traceback and (run_log.has_begun() or not self._is_of_earlier_run):
            self.log(traceback)

    def log(self, text: str) -> None:
        """To the run's log files alone, also before the run goes on."""
        for path in self.logs:
            with contextlib.suppress(OSError):  # another rank, which leaves, has removed an empty run directory
                path.parent.mkdir(parents=True, exist_ok=True)
        run_log.begin()
        record = logging.LogRecord(__name__, logging.ERROR, __file__, 0, text.rstrip(), (), None)
        for path in self.logs:
            with contextlib.suppress(OSError), path.open("a") as file:
                file.write(_FORMAT.format(record) + "\n")

    def add_rank(self, rank: Rank, place: str, own: Failure | None) -> None:
        """Where it stood, what it raised itself, its stacks and its environment; what NCCL has recorded."""
        told = [str(rank), f"process {rank.pid}", place, "", *([own.line, own.details] if own else [])]
        text = "\n".join([*told, all_stacks(), _environment()])
        self._write(f"rank_{rank.number}.txt", text.encode(errors="backslashreplace"))
        if recorded := _flight_recorder():
            self._write(f"nccl_trace_rank_{rank.number}", recorded)

    def _write(self, name: str, content: bytes, flag: int = os.O_TRUNC) -> None:
        self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder.parent, self.folder):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o700)
        with open(os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | flag, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the umask
            file.write(content)

    @property
    def _first_failure(self) -> Path:
        return self.folder / "failure.txt"


def to_torchrun(failure: Failure) -> None:
    """For the summary that torchrun prints of the workers that failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        details = failure.details if failure.exit_code == ExitCode.FAILED else ""
        said = {"py_callstack": f"{failure.line}\n{details}".rstrip(), "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": failure.line, "extraInfo": said}}))


def _environment() -> str:
    lines = [f"python {platform.python_version()}, {platform.platform()}"]
    lines += [f"{name} {version}" for name, version in versions.of(_PACKAGES).items()]
    lines += [f"{name}={value}" for name, value in variables.shown().items()]
    return "\n".join(["environment:", *lines]) + "\n"


def _flight_recorder() -> bytes | None:
    """The last collectives of this rank, as `torchfrtrace` reads them; None where NCCL does not run."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace", None)
    return dump() if dump is not None else None
