"""torch.compile under every strategy, and by inductor, which is a compiler of C++."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.curves import largest_difference
from tests.engine.tiny import LANGUAGE, NO_CHECKPOINTS
from tests.engine.ways import WAYS

SHORT = ("trainer.max_steps=4", "trainer.val_check_interval=4", *NO_CHECKPOINTS, "trainer.accelerator=cpu")
ONE_OF_EACH = [way for way in WAYS if not way.endswith(("× 1", "× 4"))]  # strategy; single has no number
DROPPING = ("model.dropout=0.1",)  # on one device: the ranks of a run draw other numbers than one process


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("eager"))(*LANGUAGE, *SHORT, "strategy=single")


def _is_the_run_of(eager: Finished, compiled: Finished) -> None:
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(compiled, eager, metric) <= 1e-5, metric


@pytest.mark.parametrize("way", ONE_OF_EACH)
def test_a_compiled_run_is_the_eager_one_under_every_strategy(way: str, eager: Finished, train: Train) -> None:
    compiled = ("compile=true", "compile.backend=aot_eager")
    run = train(*LANGUAGE, *SHORT, *WAYS[way].switches, *compiled, ranks=WAYS[way].ranks)
    assert "compiles   2 Block by aot_eager" in run.out
    assert "recompiled" not in run.out
    _is_the_run_of(eager, run)


@pytest.mark.parametrize("way", ["fsdp × 2", "deepspeed_stage_3 × 2"])
def test_inductor_keeps_the_curve_of_shards(way: str, eager: Finished, train: Train) -> None:
    run = train(*LANGUAGE, *SHORT, *WAYS[way].switches, "compile=true", ranks=WAYS[way].ranks)
    _is_the_run_of(eager, run)


def test_inductor_drops_the_same_units(train: Train) -> None:
    dropping = (*LANGUAGE, *SHORT, *DROPPING, "strategy=single")
    _is_the_run_of(train(*dropping), train(*dropping, "compile=true"))
