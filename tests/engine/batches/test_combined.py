"""Training loaders of unequal lengths that make a batch together: the same samples at any world size, and on."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from tests.engine.conftest import PLAIN, Finished, Train
from tests.night import at_night

PAIRS = (
    *("model._target_=tests.engine.batches.pairs.PairsModel", "data._target_=tests.engine.batches.pairs.PairsData"),
    *(
        "run_id=mine",
        "model.folder=${hydra:runtime.output_dir}",
        "trainer.accelerator=cpu",
        "trainer.log_every_n_steps=1",
    ),
    *("trainer.val_check_interval=100", "trainer.num_sanity_val_steps=0"),
)
STEPS = 17  # of 10 or 5 in an epoch


def _read(run: Finished) -> dict[int, dict[str, set[int]]]:
    """Of each step and each loader, the samples that all ranks read together."""
    steps: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in run.run_dir.glob("read_*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            for name in line.keys() - {"step"}:
                steps[line["step"]][name] |= set(line[name])
    return {step: dict(read) for step, read in steps.items()}


@pytest.mark.parametrize("mode", ["null", *at_night("max_size", "min_size")])
def test_two_loaders_read_the_same_at_any_world_size_and_after_a_resume(mode: str, train: Train) -> None:
    run = (*PAIRS, f"data.mode={mode}")
    whole = train(*run, f"trainer.max_steps={STEPS}")
    split = train(*run, f"trainer.max_steps={STEPS}", "micro_batch_size=16", ranks=2)
    first = train(*run, "trainer.max_steps=7", "data.workers=2")
    train(*run, f"trainer.max_steps={STEPS}", folder=first.folder)
    assert _read(split) == _read(whole)
    assert _read(first) == _read(whole)
    assert split.column("train/loss") == pytest.approx(whole.column("train/loss"), abs=1e-5)
    longest = {"null": {"a": 64, "b": 64}, "min_size": {"a": 64, "b": 64}, "max_size": {"a": 64}}
    assert {name: len(read) for name, read in _read(whole)[7].items()} == longest[mode]


@pytest.mark.nightly
def test_a_shorter_loader_is_read_again_in_another_order(train: Train) -> None:
    read = _read(train(*PAIRS, "data.mode=max_size_cycle", "trainer.max_steps=10"))
    rounds = [[read[step]["b"] for step in steps] for steps in (range(5), range(5, 10))]
    assert all(set.union(*batches) == set(range(320)) for batches in rounds)
    assert rounds[0] != rounds[1]


def test_a_fraction_is_one_of_the_epoch_of_all_loaders(train: Train) -> None:
    run = (*PAIRS, "data.mode=null", "data.a=320", "data.b=640", "trainer.max_epochs=1", "trainer.max_steps=-1")
    run += ("trainer.check_val_every_n_epoch=null",)
    assert len(_read(train(*run, "trainer.limit_train_batches=0.5"))) == 5
    refused = train(*run, "trainer.limit_train_batches=0.5", "micro_batch_size=32", check=False)
    assert "limit_train_batches=0.5 of several training loaders may end within a step of 2 micro" in refused.refusal


def test_loaders_of_as_many_samples_are_shuffled_each_in_its_own_way(train: Train) -> None:
    read = _read(train(*PAIRS, "data.mode=null", "data.b=640", "trainer.max_steps=1"))
    assert read[0]["a"] != read[0]["b"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("data.mode=sequential",),
            "the training loaders are a CombinedLoader with mode=sequential, which the Trainer",
        ),
        (("data.mode=null", "data.b=321"), "a training loader of 321 samples, one of several, ends with a batch of 1,"),
    ],
)
def test_what_can_not_be_combined_is_refused_in_a_line(arguments: tuple[str, ...], line: str, train: Train) -> None:
    refused = train(*PAIRS, *arguments, "micro_batch_size=32", check=False)
    assert refused.err.startswith(f"error: {line}")
    assert (refused.returncode, len(refused.err.splitlines())) == (2, 1)


@pytest.mark.nightly
def test_a_run_that_logs_no_steps_trains(train: Train) -> None:
    run = train(*PLAIN, "trainer.log_every_n_steps=0", "trainer.max_steps=3", "trainer.val_check_interval=3")
    assert not any(row.get("train/loss") for row in run.metrics())
    assert set(run.column("val/loss")) == {2}
