"""The crash report of a run, in its directory: the first failure, and what each rank knows."""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
import time
from pathlib import Path

from lightswitch.launch import variables, versions
from lightswitch.launch.mistakes import EXIT_CODE
from lightswitch.launch.watch.failure import FAILED, Failure, Rank
from lightswitch.launch.watch.stacks import all_stacks

_PACKAGES = ("lightswitch", "torch", "lightning", "deepspeed", "numpy")


class CrashReport:
    """`crash/<time of the start>/`, of one start of the run; written only when it fails, and for its owner's eyes."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "crash" / time.strftime("%Y-%m-%d_%H-%M-%S")

    def tell(self, failure: Failure) -> int:
        """What the run failed of, to the user, once for all processes of the run; the exit code."""
        text = f"{failure.line}\n{failure.details}".rstrip() + "\n"
        try:
            self._write("failure.txt", text.encode(errors="backslashreplace"), os.O_EXCL)
            if failure.exit_code != EXIT_CODE:  # a mistake's line says all
                text += f"crash report: {os.path.relpath(self.folder)}\n"
        except FileExistsError:  # another process was first
            return self.exit_code() or failure.exit_code
        except OSError as error:  # a full disk, for one: several ranks may tell it then
            text += f"no crash report could be written: {error}\n"
        print(text, end="", file=sys.stderr, flush=True)
        return failure.exit_code

    def exit_code(self) -> int | None:
        """Of the failure that was told; None while there is none."""
        if not self._first_failure.exists():
            return None
        return EXIT_CODE if self._first_failure.read_text().startswith("error: ") else FAILED

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


@functools.cache
def of(run_dir: Path) -> CrashReport:
    """This process's one. The ranks agree on rank 0's."""
    return CrashReport(run_dir)


def to_torchrun(failure: Failure) -> None:
    """For the summary that torchrun prints of the workers that failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        said = {"py_callstack": f"{failure.line}\n{failure.details}".rstrip(), "timestamp": str(int(time.time()))}
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
