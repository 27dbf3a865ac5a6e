"""mode=dry_run over a sweep of worlds."""

from __future__ import annotations

import json

from tests.engine.conftest import Train
from tests.engine.planning.test_dry_run import MODEL


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
