"""A failing rank's batch comes again in one process; tests/nightly types what docs/debugging.md says."""

from __future__ import annotations

import json
import re

from tests.engine.conftest import PLAIN, Train


def test_what_a_failing_rank_read_comes_again_in_one_process(train: Train) -> None:
    failing = ("model._target_=tests.engine.failures.failing.FailingModel", "model.how=raises", PLAIN[1])
    failed = train("strategy=ddp", *failing, "trainer.max_steps=4", ranks=2, check=False)
    (report,) = failed.run_dir.glob("crash/*/rank_1.txt")
    told = re.search(r"step (\d+), micro batch (\d+): samples ([\d, ]+)", report.read_text())
    assert told is not None
    step, micro, samples = int(told[1]), int(told[2]), list(map(int, told[3].split(", ")))
    record = ("callbacks.record._target_=tests.engine.plain.Record", "callbacks.record.folder=.")
    again = train("strategy=single", "micro_batch_size=32", *PLAIN, *record, "trainer.max_steps=4")
    rows = [json.loads(line) for line in (again.folder / "samples_0.jsonl").read_text().splitlines()]
    batches = [row["ids"] for row in rows if row["step"] == step]
    assert batches[micro * 2 + 1] == samples
