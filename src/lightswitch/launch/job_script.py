"""The Slurm script of a job as it would be: how it is submitted, the options in it, and what it starts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from lightswitch.planning.fakes import World

SCRIPT, OF_ONE_NODE = Path("slurm/multinode.sh"), Path("slurm/single.sh")


def told(folder: Path, world: World, kind: str, program: Sequence[str], overrides: Sequence[str]) -> dict[str, str]:
    """Return the parts of a job on the nodes of a world; nothing where the folder has no script.

    Args:
        folder: of the entry script.
        kind: of the devices.
        program: the words that start one process.
        overrides: of the run, without nodes and devices, which it takes from the job.
    """
    script = OF_ONE_NODE if world.nodes == 1 and (folder / OF_ONE_NODE).is_file() else SCRIPT  # older forks have one
    if not (folder / script).is_file():
        return {}
    options = submitted(world, kind)
    per_node = [f"--ntasks-per-node={world.devices_per_node}", *_gpus(world, kind)]
    tasks = [f"--nodes={world.nodes}", f"--ntasks={world.size}", *per_node]
    return {
        "submit": shlex.join(["sbatch", *options, str(script), *overrides]),
        "#SBATCH": shlex.join(_merged(_options_in(folder / script), options)),
        "srun": shlex.join([*tasks, *program, *overrides]),
    }


def submitted(world: World, kind: str) -> list[str]:
    """Return sbatch's options that a world needs: a task for each device."""
    if kind == "cuda":
        return [f"--nodes={world.nodes}", *_gpus(world, kind)]
    none = ["--gpus-per-node=0"] if world.nodes == 1 else []  # single.sh asks for one
    return [f"--nodes={world.nodes}", *none, f"--ntasks-per-node={world.devices_per_node}"]


def _gpus(world: World, kind: str) -> list[str]:
    return [f"--gpus-per-node={world.devices_per_node}"] if kind == "cuda" else []


def _options_in(script: Path) -> list[str]:
    """Return the options that a script gives itself."""
    return re.findall(r"^#SBATCH (--\S+)", script.read_text(), re.MULTILINE)


def _merged(own: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return a script's own options, replaced by those of the command line where both have one."""
    found = {option.partition("=")[0]: option for option in (*own, *given)}
    return list(found.values())
