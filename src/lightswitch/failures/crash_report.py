"""Reports of a failure: one message on the terminal for all processes of a start, and the crash report.

The crash report is a folder in the run directory with the first failure and each rank's stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from lightswitch.context import RunContext
from lightswitch.errors import Failure, printable
from lightswitch.failures.classify import Rank, one_line
from lightswitch.process import ignore_signals
from lightswitch.runs import log as run_log

_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
_OTHERS_SECONDS = 15.0  # to wait for the processes started together with this one
_POLL_SECONDS = 0.02


class CrashReport:
    """The folder `crash/<start time>/`, written when a run fails because of a bug or a lost node.

    Only its owner can read it.

    Attributes:
        logs: the run's log files. Rank 0 writes them; the rank that reports the failure appends to them.
    """

    def __init__(self, run: RunContext) -> None:
        self.run = run
        handlers = run.hydra.job_logging.get("handlers") or {}
        self.logs = [Path(str(handler.filename)) for handler in handlers.values() if handler.get("filename")]
        if run.process.crash_folder is None:
            run.process.crash_folder = run.run_dir / "crash" / time.strftime("%Y-%m-%d_%H-%M-%S")

    @property
    def folder(self) -> Path:
        """The report's folder, the same for all ranks once they have connected to one another."""
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
        except OSError as error:  # for example a full disk: several ranks may then print the failure
            text += f"no crash report could be written: {error}\n"
        print(text, end="", file=sys.stderr, flush=True)
        self.log(text)
        return failure.exit_code

    def log_details(self, traceback: str) -> None:
        """Log the traceback behind a problem, unless the log belongs to an earlier run that is not resumed."""
        if traceback and (run_log.has_begun() or not (self.run.run_dir / "config.yaml").exists()):
            self.log(traceback)

    def log(self, text: str) -> None:
        """Write text to the run's log files but not to the terminal, even before the run has begun."""
        run_log.begin()
        record = logging.LogRecord(__name__, logging.ERROR, __file__, 0, text.rstrip(), (), None)
        for path in self.logs:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)  # an exiting rank has removed the empty run directory
                with path.open("a") as file:
                    file.write(_FORMAT.format(record) + "\n")

    def add_rank(self, rank: Rank, location: str, own: Failure | None) -> None:
        """Write a rank's file (its location in training, error and stacks) and its NCCL trace, if any."""
        parts = [str(rank), f"process {rank.pid}", location, "", *([own.line, own.details] if own else [])]
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            text = "\n".join([*parts, stacks.read()])
        self._write(f"rank_{rank.number}.txt", text.encode(errors="backslashreplace"))
        # this rank's last collectives, in the format that `torchfrtrace` reads; torch without NCCL has no recorder
        dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace", None)
        if dump is not None and (recorded := dump()):
            self._write(f"nccl_trace_rank_{rank.number}", recorded)

    def _write(self, name: str, content: bytes, flag: int = os.O_TRUNC) -> None:
        self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder.parent, self.folder):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o700)
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | flag, 0o600)
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # regardless of the umask
            file.write(content)


def add_report(error: BaseException, own: Failure, rank: Rank, location: str, report: CrashReport) -> None:
    """Write the crash report of a rank without a watchdog, and add the report's path to the error as a note.

    Args:
        location: the position in training, in words.
    """
    if report.folder.exists():
        return
    with contextlib.suppress(OSError):  # for example a full disk: the original error matters more
        report.add_rank(rank, location, own)
        if not own.line.endswith(one_line(error)) or own.lacks_memory:
            error.add_note(own.line)  # printed below the traceback
        error.add_note(f"crash report: {os.path.relpath(report.folder)}")


def print_once(lines: str, is_alone: bool = False) -> bool:
    """Print lines to stderr unless another process of the same start has printed them; return whether this one did.

    The process that is first to write into a folder of the working directory prints, and removes the folder once all
    are in it: as soon as a process ends, its launcher kills the others, and their exit codes are lost.

    Args:
        is_alone: whether no launcher has started other processes, although the variables of a rank are exported.
    """
    lines, together, count = printable(lines), *(("", 1) if is_alone else _started_together(os.environ))
    if count == 1:
        print(lines, file=sys.stderr, flush=True)
        return True
    ignore_signals()
    folder = Path(f".lightswitch_{blake2b(together.encode(), digest_size=8).hexdigest()}")
    end = time.monotonic() + _OTHERS_SECONDS
    with contextlib.suppress(OSError):  # no write permission here: each process prints the lines
        folder.mkdir(exist_ok=True)
        try:
            (folder / "printed").touch(exist_ok=False)
        except FileExistsError:
            (folder / f"{socket.gethostname()}_{os.getpid()}").touch()
            while folder.exists() and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            if not folder.exists():  # otherwise its first process was killed, and may not have printed
                return False
    print(lines, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        while len(list(folder.iterdir())) < count and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    return True


def _started_together(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return a text that identifies the processes started by one command, and their number."""
    if "TORCHELASTIC_RUN_ID" in environ:
        together, count = f"{socket.gethostname()} {os.getppid()}", environ.get("LOCAL_WORLD_SIZE", "")
    elif "SLURM_STEP_ID" in environ:
        names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
        together, count = " ".join(environ.get(name, "") for name in names), environ.get("SLURM_STEP_NUM_TASKS", "")
    else:  # processes that were started one by one may have a terminal each
        return "", 1
    return together, int(count) if count.isdecimal() else 1
