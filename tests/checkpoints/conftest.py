"""Runs whose checkpoints are taken out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from tests.conftest import runs_in

# Of those with portable checkpoints, with the ranks they run on.
STRATEGIES = {
    **{"single": 1, "ddp": 2, "fsdp": 2, "fsdp1": 2, "deepspeed_stage_2": 2, "deepspeed_stage_3": 2},
    "fsdp_tp trainer.strategy.tensor_parallel_size=2": 4,
}

SHORT = ("trainer.max_steps=4", "trainer.val_check_interval=2", "global_batch_size=24", "run_id=mine")
ANSWERS = (
    "callbacks.answer._target_=tests.checkpoints.models.Answer",
    "callbacks.answer.folder=${hydra:runtime.output_dir}",
)
MODELS = {
    "gpt": (*tiny.GPT, "model._target_=tests.checkpoints.models.LogitsGPT"),
    "tied": ("model._target_=tests.checkpoints.models.Tied", "data._target_=tests.plain.PlainData"),
    "versioned": ("model._target_=tests.checkpoints.models.Versioned", "data._target_=tests.plain.PlainData"),
    "configured": ("model._target_=tests.checkpoints.models.Configured", "data._target_=tests.plain.PlainData"),
}

RunOf = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """`run_of(model, strategy)`: the directory of a finished run, trained when it is first asked for."""
    runs: dict[tuple[str, str], Path] = {}

    def run_dir(model: str, strategy: str = "single") -> Path:
        if (model, strategy) not in runs:
            train = runs_in(tmp_path_factory.mktemp(f"{model}_{strategy.partition(' ')[0]}"))
            finished = train(
                *MODELS[model], *SHORT, *ANSWERS, *f"strategy={strategy}".split(), ranks=STRATEGIES[strategy]
            )
            runs[model, strategy] = finished.run_dir
        return runs[model, strategy]

    return run_dir
