"""What torchrun --nnodes=MIN:MAX may come to is looked at before a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightswitch.cluster.placement import NO_SHARED_STORE, Placement, elastic_nodes
from lightswitch.launch import commands
from tests.engine.requests import composed, composing, problems
from tests.engine.tiny import LANGUAGE_MODEL, TEXT

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
