"""What a run shows of its steps: a trace, a snapshot of memory, utilization, and a validation before the first."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.engine.conftest import Train
from tests.engine.tiny import LANGUAGE_MODEL, TEXT

SHORT = (*LANGUAGE_MODEL, TEXT, "trainer.accelerator=cpu", "trainer.log_every_n_steps=1")
SHORT += ("trainer.val_check_interval=6", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1")


def test_a_run_shows_a_trace_its_utilization_and_what_the_model_was_worth_at_first(train: Train) -> None:
    words = (*SHORT, "trainer.max_steps=6", "plan.device=h100", "strategy=single")
    shown = ("callbacks=[default,trace,validate_at_start]", "callbacks.trace.skip_steps=2", "callbacks.trace.steps=2")
    plain, run = train(*words), train(*words, *shown)
    assert run.column("train/loss") == plain.column("train/loss")
    first, last = run.column("val/loss")[0], run.column("val/loss")[5]
    assert last < first
    assert plain.column("val/loss") == {5: last}
    trace = json.loads(gzip.decompress((run.run_dir / "trace/rank_0.json.gz").read_bytes()))
    assert any(event["name"] == "aten::addmm" or event["name"] == "aten::mm" for event in trace["traceEvents"])
    utilization = run.column("throughput/mfu")
    seconds = run.column("throughput/step_seconds")
    # the peak of an H100 in 32 bits: 67e12 operations a second
    tflop = [share * seconds[step] * 67 for step, share in utilization.items()]
    assert tflop == pytest.approx([tflop[0]] * len(tflop))
    # of the head alone: 6 × 256 × 32 for each of 64 × 32 bytes; with the blocks less than ten times that
    assert 1e-4 < tflop[0] < 1e-3


def test_a_snapshot_of_memory_is_refused_on_a_cpu(train: Train) -> None:
    refused = train(*SHORT, "trainer.max_steps=1", "callbacks=[default,memory_snapshot]", check=False)
    assert refused.refusal.startswith("memory_snapshot reads the allocator of CUDA, and this run is on a CPU")
