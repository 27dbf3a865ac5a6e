"""Runs whose checkpoints are taken out."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine import tiny
from tests.engine.conftest import runs_in
from tests.engine.ways import WAYS, Way

PLAN = "trainer.strategy.plans.LogitsGPT=project.models.gpt_plan.tensor_parallel"
STRATEGIES = {
    "single": Way(("strategy=single",)),
    **{name: Way((f"strategy={name}",), 2) for name in ("ddp", "fsdp", "fsdp1")},
    **{name: Way((f"strategy={name}",), 2) for name in ("deepspeed_stage_2", "deepspeed_stage_3")},
    "fsdp_tp": Way((*WAYS["fsdp_tp 2 × 2"].switches, PLAN), 4),
}

SHORT = ("trainer.max_steps=4", "trainer.val_check_interval=2", "global_batch_size=24", "run_id=mine")
ANSWERS = (
    "callbacks.answer._target_=tests.engine.checkpoints.models.Answer",
    "callbacks.answer.folder=${hydra:runtime.output_dir}",
)
MODELS = {
    "gpt": (*tiny.GPT, "model._target_=tests.engine.checkpoints.models.LogitsGPT"),
    "tied": ("model._target_=tests.engine.checkpoints.models.Tied", "data._target_=tests.engine.plain.PlainData"),
    "versioned": (
        "model._target_=tests.engine.checkpoints.models.Versioned",
        "data._target_=tests.engine.plain.PlainData",
    ),
    "configured": (
        "model._target_=tests.engine.checkpoints.models.Configured",
        "data._target_=tests.engine.plain.PlainData",
    ),
}

Disk = Callable[[str], Path]
RunOf = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """`run_of(model, strategy)`: the directory of a finished run, trained when it is first asked for."""
    runs: dict[tuple[str, str], Path] = {}

    def run_dir(model: str, strategy: str = "single") -> Path:
        if (model, strategy) not in runs:
            train, way = runs_in(tmp_path_factory.mktemp(f"{model}_{strategy}")), STRATEGIES[strategy]
            finished = train(*MODELS[model], *SHORT, *ANSWERS, *way.switches, ranks=way.ranks)
            runs[model, strategy] = finished.run_dir
        return runs[model, strategy]

    return run_dir


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """`disk("300k")`: a folder on a file system of its own, of that size."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder), capture_output=True)
        if done.returncode:
            pytest.skip("only root may mount a file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(("umount", "--lazy", folder), check=True)
