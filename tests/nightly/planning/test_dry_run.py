"""mode=dry_run under the other strategies, and over a sweep of worlds."""

from __future__ import annotations

import json

import pytest

from tests.engine.conftest import Train
from tests.engine.planning.test_dry_run import MODEL, is_what_each_rank_does


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp_tp"])
def test_each_rank_does_what_a_dry_run_says(strategy: str, train: Train) -> None:
    is_what_each_rank_does(strategy, train)


def test_a_sweep_ends_with_how_the_run_scales(train: Train) -> None:
    words = (
        "strategy=fsdp",
        "plan.device=h100",
        "global_batch_size=16",
        "micro_batch_size=2",
        "dry_run.weak_devices=2",
    )
    run = train("-m", "mode=dry_run", *MODEL, *words, "trainer.devices=4", "run_id=grid")
    (folder,) = run.folder.glob("runs/*/grid")
    strong, weak = json.loads((folder / "scaling.json").read_text())
    assert [(line["kind"], len(line["points"])) for line in (strong, weak)] == [("strong", 1), ("weak", 1)]
    of_strong, of_weak = strong["points"][0], weak["points"][0]
    assert (of_strong["ranks"], of_strong["global_batch"], of_strong["accumulation"]) == (4, 16, 2)
    assert (of_weak["ranks"], of_weak["global_batch"], of_weak["accumulation"]) == (4, 32, 4)
    assert of_weak["received_bytes"] > of_strong["received_bytes"]
    assert {path.name for path in folder.iterdir()} >= {"scaling.svg", "scaling_dark.svg"}
    assert "efficiency" in run.out
