"""mode=dry_run over a sweep of worlds."""

from __future__ import annotations

import json

from tests.engine.conftest import Train
from tests.engine.planning.test_dry_run import MODEL


def test_a_sweep_ends_with_how_the_run_scales(train: Train) -> None:
    words = ("strategy=fsdp", "plan.device=h100", "global_batch_size=16", "micro_batch_size=2")
    run = train("-m", "mode=dry_run", *MODEL, *words, "trainer.devices=2,4", "run_id=grid")
    (folder,) = run.folder.glob("runs/*/grid")
    (line,) = json.loads((folder / "scaling.json").read_text())
    found = [(point["ranks"], point["global_batch"], point["accumulation"]) for point in line["points"]]
    assert found == [(2, 16, 4), (4, 16, 2)]
    assert {path.name for path in folder.iterdir()} >= {"scaling.svg", "scaling_dark.svg"}
    assert "efficiency" in run.out
