"""Values that config keys accept: words, types, the choices of a group, and names of runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydra.conf import HydraConf

AUTO = "auto"
LARGEST_INTEGER = 2**63 - 1  # torch and NumPy count in 64 bits
LEAST_SECONDS = {"watch.lost_after_seconds": 5}  # a rank may be silent for some seconds, for example while it compiles
LEAST_SECONDS_OF_OTHERS, MOST_SECONDS = 1, 2_000_000  # 23 days; sockets and gloo count milliseconds in 32 bits

ALLOWED = {
    "mode": ("fit", "validate", "test", "predict", "plan", "dry_run", "check"),
    "on_nan": ("stop", "skip", "ignore"),
    "matmul_precision": ("highest", "high", "medium"),
}
WORDS = {"micro_batch_size": (AUTO,)}  # in addition to values of its types
_NULL = type(None)
KINDS: dict[str, tuple[type, ...]] = {  # types of keys that every config has
    "name": (str,),
    "run_id": (str, int),
    "seed": (int,),
    "mode": (str,),
    "objective": (str,),
    "resume": (str,),
    "init_from": (str, _NULL),
    "ckpt_path": (str, _NULL),
    "global_batch_size": (int,),
    "micro_batch_size": (int, _NULL),
    "meet_timeout_seconds": (int, float),
}
KINDS_OF_OTHERS: dict[str, tuple[type, ...]] = {  # a config of an older version may lack them
    "compare": (bool,),
    "init_names": (dict, _NULL),
    "tags": (list,),
    "on_nan": (str,),
    "matmul_precision": (str,),
    "lr_scaling.rule": (str,),
    "lr_scaling.reference_batch_size": (int,),
    "watch.lost_after_seconds": (int, float),
    "watch.hung_after_seconds": (int, float),
    "plan.memory_gib": (int, float, _NULL),
    "plan.deepspeed": (bool,),
    "plan.precisions": (str, list, _NULL),
    "plan.disk_gb_per_second": (int, float),
    "plan.tokens_per_sample": (int, _NULL),
    "dry_run.rank": (int, list, _NULL),
    "dry_run.steps": (int,),
    "check.steps": (int,),
    "check.devices": (int,),
    "check.strategies": (str, list, _NULL),
    "sweep.jobs_at_once": (int, _NULL),
    "sweep.devices_per_job": (int, _NULL),
}


_LONGEST = 128
_FORM = "letters, digits and . _ - = , are allowed"


def name_problems(names: Mapping[str, object]) -> Iterator[str]:
    """Yield a message for each invalid name, with what to type instead.

    Args:
        names: names by key, such as `{"run_id": "mine"}`.
    """
    for key, name in names.items():
        text = "" if name is None else str(name)
        if not text:
            yield f"{key} is empty; type {key}=NAME"
        elif text in (".", ".."):
            yield f"{key}={text} can't be the name of a folder; type {key}=NAME"
        elif not re.fullmatch(r"[A-Za-z0-9._=,-]+", text):
            yield f"{key}={text[:_LONGEST]!r} is no valid name: {_FORM}; type {key}=NAME"
        elif len(text) > _LONGEST:
            yield f"{key} has {len(text)} characters, and {_LONGEST} are allowed; type {key}=NAME"


def files_of_group(hydra: HydraConf, group: str) -> dict[str, Path]:
    """Return the file of each choice of a group, by name; if two folders have the name, the file that Hydra takes."""
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    found = {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}
    return {name: path for name, path in sorted(found.items()) if path.is_file()}  # a link to nothing is a lock
