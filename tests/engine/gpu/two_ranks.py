"""Two ranks that share a card, as nodes of one device each, which NCCL takes for two machines.

python -m tests.engine.gpu.two_ranks COMMAND …     # started once for each rank
python -m tests.engine.gpu.two_ranks               # whether the two can talk at all: an all-reduce
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from tests.runs import as_torchrun

SMOKE = (sys.executable, "-m", "tests.engine.gpu.two_ranks", "--rank")


def main(arguments: list[str]) -> int:
    if arguments == ["--rank"]:
        return summed()
    with as_torchrun(2, f"shared_{os.getpid()}", each_a_node=True) as environments:
        ranks = [subprocess.Popen([*(arguments or SMOKE)], env=os.environ | own) for own in environments]
        while None in (codes := [rank.poll() for rank in ranks]):
            if not arguments and any(codes):  # NCCL leaves the other one waiting
                time.sleep(2)
                for rank in ranks:
                    rank.kill()
            time.sleep(0.1)
        codes = [rank.wait() for rank in ranks]
    return next((code for code in codes if code > 0), next((1 for code in codes if code), 0))


def summed() -> int:
    """Check that the two ranks add what they have."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    value = torch.full((1 << 20,), 1.0 + dist.get_rank(), device=device)
    dist.all_reduce(value)
    assert value.eq(3).all()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
