"""The crash report in a run's directory: the first failure, and each rank's stacks and environment."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
import time
from pathlib import Path

from lightswitch import regular_files, versions
from lightswitch.cluster import variables
from lightswitch.context import RunContext
from lightswitch.errors import ExitCode, Failure
from lightswitch.fault_tolerance.failure import Rank
from lightswitch.fault_tolerance.stacks import all_stacks
from lightswitch.runs import log as run_log

_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
_PACKAGES = ("lightswitch", "torch", "lightning", "deepspeed", "numpy")


class CrashReport:
    """The folder `crash/<time of the start>/`, written when a run fails by a bug or a lost machine.

    Only its owner may read it.

    Attributes:
        logs: the run's log files. Rank 0 writes them; the rank that reports the failure adds it.
    """

    def __init__(self, run: RunContext) -> None:
        self.run = run
        handlers = run.hydra.job_logging.get("handlers") or {}
        self.logs = [Path(str(handler.filename)) for handler in handlers.values() if handler.get("filename")]
        if run.process.crash_folder is None:
            run.process.crash_folder = run.run_dir / "crash" / time.strftime("%Y-%m-%d_%H-%M-%S")

    @property
    def folder(self) -> Path:
        """The report's folder, the same for all ranks once they have connected."""
        assert self.run.process.crash_folder is not None
        return self.run.process.crash_folder

    def print_failure(self, failure: Failure) -> int:
        """Print the run's failure, once for all of its processes, and return the exit code."""
        self.run.process.note_failure(failure.line)
        text = f"{failure.line}\n{failure.details}".rstrip() + "\n"
        try:
            self._write("failure.txt", text.encode(errors="backslashreplace"), os.O_EXCL)
            text += f"crash report: {os.path.relpath(self.folder)}\n"
        except FileExistsError:  # another process was first
            return failure.exit_code
        except OSError as error:  # as on a full disk: several ranks may print it then
            text += f"no crash report could be written: {error}\n"
        print(text, end="", file=sys.stderr, flush=True)
        self.log(text)
        return failure.exit_code

    @property
    def _is_of_earlier_run(self) -> bool:
        """Whether the directory holds a run's record, of this start or an earlier one."""
        return (self.folder.parent.parent / "config.yaml").exists()

    @property
    def is_told(self) -> bool:
        """Whether a process of this run has printed its failure."""
        return self._first_failure.exists()

    def log_details(self, traceback: str) -> None:
        """Log the traceback behind a problem, unless the log is an earlier run's, which this start does not resume."""
        if traceback and (run_log.has_begun() or not self._is_of_earlier_run):
            self.log(traceback)

    def log(self, text: str) -> None:
        """Write text to the run's log files only, also before the run goes on."""
        for path in self.logs:
            with contextlib.suppress(OSError):  # another rank, which leaves, has removed an empty run directory
                path.parent.mkdir(parents=True, exist_ok=True)
        run_log.begin()
        record = logging.LogRecord(__name__, logging.ERROR, __file__, 0, text.rstrip(), (), None)
        for path in self.logs:
            with contextlib.suppress(OSError):
                descriptor = regular_files.open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                with open(descriptor, "a") as file:
                    file.write(_FORMAT.format(record) + "\n")

    def add_rank(self, rank: Rank, location: str, own: Failure | None) -> None:
        """Write a rank's file: its location in training, its own error, stacks and environment; and NCCL's trace."""
        told = [str(rank), f"process {rank.pid}", location, "", *([own.line, own.details] if own else [])]
        text = "\n".join([*told, all_stacks(), _environment()])
        self._write(f"rank_{rank.number}.txt", text.encode(errors="backslashreplace"))
        if recorded := _flight_recorder():
            self._write(f"nccl_trace_rank_{rank.number}", recorded)

    def _write(self, name: str, content: bytes, flag: int = os.O_TRUNC) -> None:
        self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder.parent, self.folder):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o700)
        descriptor = regular_files.open_own(self.folder / name, os.O_WRONLY | os.O_CREAT | flag, 0o600)
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the umask
            file.write(content)

    @property
    def _first_failure(self) -> Path:
        return self.folder / "failure.txt"


def write_for_torchrun(failure: Failure) -> None:
    """Write the failure to the file from which torchrun prints its summary of failed workers."""
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
    """Return the last collectives of this rank in the form that `torchfrtrace` reads; None without NCCL."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace", None)
    return dump() if dump is not None else None
