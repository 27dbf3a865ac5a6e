from __future__ import annotations

import pytest
from tests.conftest import Finished, Train, runs_in
from tests.tiny import GPT, NO_CHECKPOINTS

def test_tp(train: Train) -> None:
    reference = train(*GPT, *NO_CHECKPOINTS, "strategy=single", "trainer.accelerator=cpu")
    for ranks in (4,):
        sharded = train(*GPT, *NO_CHECKPOINTS, "strategy=fsdp_tp", "trainer.accelerator=cpu", ranks=ranks)
        print(sharded.out[:500])
        for metric in ("train/loss", "val/loss", "test/loss"):
            expected, found = reference.column(metric), sharded.column(metric)
            assert found.keys() == expected.keys()
            delta = max(abs(found[step] - expected[step]) for step in expected)
            print(ranks, metric, delta)
            assert  delta<= 1e-5
