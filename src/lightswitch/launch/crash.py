"""The crash report of a run, in its directory: the first failure, and what each rank knows."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import sys
import time
from pathlib import Path

from lightswitch.launch import versions
from lightswitch.launch.watch.failure import FAILED, Failure, Rank
from lightswitch.launch.watch.stacks import all_stacks

_PACKAGES = ("lightswitch", "torch", "lightning", "deepspeed", "numpy")
_VARIABLES = re.compile(
    r"(CUDA|NCCL|TORCH|PYTORCH|GLOO|SLURM|OMP|MKL|LD|PL|DS|HF)_|(LOCAL_|GROUP_|NODE_)?RANK$|(LOCAL_)?WORLD_SIZE$|MASTER_"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")


class CrashReport:
    """`crash/<time of the start>/`, of one start of the run; written only when it fails."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "crash" / time.strftime("%Y-%m-%d_%H-%M-%S")

    def tell(self, failure: Failure) -> int:
        """What the run failed of, to the user, once for all processes of the run; the exit code."""
        text = f"{failure.line}\n{failure.details}".rstrip() + "\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._first_failure.open("x") as file:
                file.write(text)
            text += f"crash report: {os.path.relpath(self.folder)}\n"
        except FileExistsError:  # another process was first
            return self.exit_code() or failure.exit_code
        except OSError as error:  # a full disk, for one: several ranks may tell it then
            text += f"no crash report could be written: {error}\n"
        print(text, end="", file=sys.stderr, flush=True)
        return failure.exit_code

    def exit_code(self) -> int | None:
        """Of the failure that was told; None while there is none."""
        return FAILED if self._first_failure.exists() else None

    def add_rank(self, rank: Rank, place: str, own: Failure | None) -> None:
        """Where it stood, what it raised itself, its stacks and its environment; what NCCL has recorded."""
        told = [str(rank), f"process {rank.pid}", place, "", *([own.line, own.details] if own else [])]
        text = "\n".join([*told, all_stacks(), _environment()])
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"rank_{rank.number}.txt").write_text(text)
        if recorded := _flight_recorder():
            (self.folder / f"nccl_trace_rank_{rank.number}").write_bytes(recorded)

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
    variables = {
        name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name) and not _SECRET.search(name)
    }
    lines = [f"python {platform.python_version()}, {platform.platform()}"]
    lines += [f"{name} {version}" for name, version in versions.of(_PACKAGES).items()]
    return "\n".join(["environment:", *lines, *(f"{name}={value}" for name, value in variables.items())]) + "\n"


def _flight_recorder() -> bytes | None:
    """The last collectives of this rank, as `torchfrtrace` reads them; None where NCCL does not run."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace", None)
    return dump() if dump is not None else None
