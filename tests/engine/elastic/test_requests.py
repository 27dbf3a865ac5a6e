"""What torchrun --nnodes=MIN:MAX may come to is looked at before a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightswitch.cluster.placement import NO_SHARED_STORE, Placement, elastic_nodes
from lightswitch.launch import commands
from tests.engine.requests import composed, composing, problems
from tests.engine.tiny import LANGUAGE_MODEL, TEXT
from tests.engine.ways import PLAN

STARTED = {"TORCHELASTIC_RUN_ID": "mine", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {**STARTED, NO_SHARED_STORE: "1"}.items():
        monkeypatch.setenv(name, value)
    with composing():
        yield


def refused(*words: str, into: Path) -> set[str]:
    request = composed(*LANGUAGE_MODEL, TEXT, "trainer.accelerator=cpu", *words, into=into / "runs/tiny/mine")
    return problems(request, Placement("torchrun", nodes=4, devices_per_node=2))


TENSOR_PARALLEL = ("strategy=fsdp_tp", PLAN, "trainer.strategy.tensor_parallel_size=4")
HYBRID = ("strategy=fsdp_hybrid", "trainer.strategy.shard_size=4")
REQUESTS = [  # torchrun's --nnodes, what is typed, and with how many nodes the run could not go on, and why
    ("1:4", TENSOR_PARALLEL, "1 node: trainer.strategy.tensor_parallel_size=4 does not divide 1 × 2 devices; use "),
    ("1:4", HYBRID, "1 node: trainer.strategy.shard_size=4 does not divide 2 devices; use one of 1, 2"),
    ("3:5", TENSOR_PARALLEL, "3 nodes: "),
    ("2:4", ("strategy=fsdp",), None),
]


@pytest.mark.parametrize(("nnodes", "words", "told"), REQUESTS)
def test_a_number_of_nodes_at_which_a_run_can_not_train_is_refused_at_the_start(
    nnodes: str, words: tuple[str, ...], told: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PET_NNODES", nnodes)
    lines = refused(*words, into=tmp_path)
    begins = () if told is None else (f"torchrun --nnodes={nnodes} may continue with {told}",)
    assert [line[: len(begin)] for line, begin in zip(lines, begins, strict=True)] == [*begins], lines


def test_torchrun_that_would_not_survive_a_change_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PET_NNODES", "2:4")
    monkeypatch.delenv(NO_SHARED_STORE)
    (told,) = refused(into=tmp_path)
    assert told.endswith(f"type export {NO_SHARED_STORE}=1 on every node before torchrun")
    monkeypatch.setenv("PET_NNODES", "4")
    assert refused(into=tmp_path) == set()


@pytest.mark.parametrize(("typed", "nodes"), [("2:4", range(2, 5)), ("2:2", None), ("3", None), ("", None)])
def test_numbers_of_nodes_are_read_as_torchrun_reads_them(typed: str, nodes: range | None) -> None:
    assert elastic_nodes({**STARTED, "PET_NNODES": typed}) == nodes
    assert elastic_nodes({"PET_NNODES": typed}) is None, "no torchrun has started this process"


def test_what_is_printed_to_be_typed_next_is_not_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfg = composed(*LANGUAGE_MODEL, TEXT, into=tmp_path / "runs/tiny/mine").cfg
    for nodes, starts in (("2:4", f"env {NO_SHARED_STORE}=1 torchrun "), ("4", "torchrun ")):
        monkeypatch.setenv("PET_NNODES", nodes)
        assert commands.repeat(cfg, Placement("torchrun", nodes=4, devices_per_node=2)).startswith(starts)
