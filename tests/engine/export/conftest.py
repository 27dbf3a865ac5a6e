"""Runs whose checkpoints are taken out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import PLAIN_DATA, runs_in
from tests.engine.tiny import LANGUAGE
from tests.engine.ways import WAYS, Way

STRATEGIES = {
    "single": Way(("strategy=single",)),
    **{name: Way((f"strategy={name}",), 2) for name in ("ddp", "fsdp", "deepspeed_stage_3")},
    "fsdp_tp": WAYS["fsdp_tp 2 × 2"],
}

SHORT = ("trainer.max_steps=4", "trainer.val_check_interval=2", "global_batch_size=24", "run_id=mine")
ANSWERS = (
    "callbacks.answer._target_=tests.engine.export.models.Answer",
    "callbacks.answer.folder=${hydra:runtime.output_dir}",
)
MODELS = {
    "language": (*LANGUAGE, "model.width=32"),
    "tied": ("model._target_=tests.engine.export.models.Tied", PLAIN_DATA),
    "versioned": ("model._target_=tests.engine.export.models.Versioned", PLAIN_DATA),
    "configured": ("model._target_=tests.engine.export.models.Configured", PLAIN_DATA),
}

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
