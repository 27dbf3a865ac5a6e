"""What a step costs in counts, which are the same on every machine: whoever adds a call has to remove another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.launch.counted import STEPS
from tests.engine.processes import TRAIN_PY, Start, said

CALLS = {"one process": 766, "ddp": 886}  # of Python in a step, measured; plain Lightning makes 2,397
NOISE = 1.02  # progress is shown, and stops are exchanged, by the clock
WAYS = {"one process": ["strategy=single"], "ddp": ["strategy=ddp", "trainer.devices=2"]}
RUN = (
    *("model._target_=benchmarks.mlp.MLP", "data._target_=benchmarks.mlp.PointsData", "data.samples=60000"),
    *("trainer.accelerator=cpu", "global_batch_size=32", f"trainer.max_steps={STEPS + 300}"),
    *("trainer.gradient_clip_val=1.0", "trainer.limit_test_batches=1", "trainer.limit_val_batches=1"),
    *("trainer.log_every_n_steps=50", "+callbacks.counts._target_=tests.engine.launch.counted.Counts"),
)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_makes_no_more_calls_and_collectives(way: str, start: Start, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    process = start(sys.executable, TRAIN_PY, *RUN, *WAYS[way], f"+callbacks.counts.path={path}")
    out = said(process)
    assert process.returncode == 0, out
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["calls"] <= NOISE * CALLS[way]
    collectives = found["collectives"]
    if way == "one process":
        assert not collectives
    else:  # DDP's bucket of gradients in each step, the exchange of stops in few, and a logged step's mean of the loss
        assert collectives.pop("all_reduce") <= 1.5
        assert collectives == {"all_gather": 0.02 + 0.03, "broadcast": 0.02}  # of other logged values, and of a save
