"""Which of the engine's tests are slow or need a GPU; what runs train.py for them is in tests/runs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.interpreter import python
from tests.engine.processes import port, start
from tests.runs import CHECKOUT, GPUS, Finished, Train, as_torchrun, context, environment, no_gpus, runs_in

__all__ = ["CHECKOUT", "PLAIN", "PLAIN_DATA", "PLAIN_MODEL", "Finished", "Train", "as_torchrun", "context"]
__all__ += ["environment", "no_gpus", "port", "python", "runs_in", "start", "train"]  # fixtures, for all folders

SLOW = (  # what takes most of the time, and `make test-quick` leaves out
    *(
        "slurm/",
        "benchmarks/",
        "test_checkout.py",
        "test_every_switch.py",
        "test_gpu.py",
        "test_images_and_tables.py",
        "test_matrix.py",
        "test_readme.py",
        "test_same_run.py",
        "test_survives.py",
        "test_tutorial.py",
    ),
    *(
        f"checkpoints/test_{name}.py"
        for name in ("foreign", "fuzzed", "killed", "last", "modes", "portable", "ranks", "safetensors")
    ),
    *(f"fault_tolerance/test_{name}.py" for name in ("classify", "failures", "not_finite", "preemption", "rounds")),
    *(
        f"strategies/test_{name}.py"
        for name in (
            *("communication", "compilation", "foreign_modules", "fsdp", "fsdp1", "fsdp_tp", "fused", "gathering"),
            *("module_shapes", "refused", "timeouts"),
        )
    ),
    *(
        "batches/test_combined.py",
        "batches/test_stream_runs.py",
        "compare/test_runs.py",
        "deepspeed/test_strategy.py",
        "export/test_export.py",
        "fork/test_made.py",
        "fork/test_update.py",
    ),
    *(
        "launch/test_bring_your_own.py::test_a_row_has_its_effect",
        "launch/test_choices.py",
        "launch/test_averaging.py",
        "launch/test_callbacks.py",
        "launch/test_habits.py",
        "launch/test_rate_finder.py",
        "launch/test_sharded_callbacks.py",
        "launch/test_hook_order",
        "launch/test_trainer_arguments.py",
        "launch/test_torchrun.py",
        "runs/test_claim.py",
        "runs/test_record.py",
        "sweeps/test_sweeps.py",
    ),
    *("batches/test_streams.py", "checkpoints/test_hostile.py", "doctor/", "strategies/test_ddp.py"),
    *(f"launch/test_{name}.py" for name in ("auto", "commands", "launchers")),
    *(f"planning/test_{name}.py" for name in ("dry_run", "plan", "rank", "simulation", "truth", "zero")),
)
# a fork has no quick suite, and no such mark
SLOW_OF_PROJECT = (
    *("tests/project/test_promises.py", "tests/project/examples/test_hf.py::test_a_tuned"),
    *("tests/project/examples/test_hf_plan.py", "tests/project/examples/test_text_shards.py::test_a_mixture"),
)
# the longest first, so that none is left to one worker alone at the end; those of Slurm, which wait a lot, in between
FIRST = (
    *("slurm/test_preemption.py", "test_gpu.py", "fork/test_made.py", "slurm/test_multinode.py"),
    *("strategies/test_module_shapes.py", "strategies/test_compilation.py", "slurm/", "deepspeed/test_strategy.py"),
    *("strategies/test_foreign_modules.py", "checkpoints/test_killed.py", "sweeps/test_sweeps.py", "test_matrix.py"),
)
PLAIN_MODEL, PLAIN_DATA = "model._target_=tests.engine.plain.PlainModel", "data._target_=tests.engine.plain.PlainData"
PLAIN = (PLAIN_MODEL, PLAIN_DATA)


@pytest.fixture
def train(tmp_path: Path, python: Path) -> Train:
    return runs_in(tmp_path, python)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith((*(f"tests/engine/{name}" for name in SLOW), *SLOW_OF_PROJECT)):
            item.add_marker(pytest.mark.slow)
    items.sort(key=_turn)
    for item in items:
        if (marker := item.get_closest_marker("gpu")) and (needed := marker.args[0] if marker.args else 1) > GPUS:
            item.add_marker(pytest.mark.skip(reason=f"it needs {needed} CUDA devices, and {GPUS} are here"))


def _turn(item: pytest.Item) -> int:
    beginnings = (item.nodeid.startswith(f"tests/engine/{name}") for name in FIRST)
    return next((number for number, begins in enumerate(beginnings) if begins), len(FIRST))
