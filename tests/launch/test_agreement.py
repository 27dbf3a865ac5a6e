"""Processes that were given different things, and what they are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightswitch.launch.agreement import Evidence, difference

USUAL = Evidence({"python": "3.12.1", "torch": "2.13.0"}, {"train.py": "a", "src/net.py": "b"}, {"seed": "1"})
FOUR = [replace(USUAL, rank=rank, node=f"node{rank // 2 + 1}") for rank in range(4)]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {3: {"versions": {"python": "3.12.1", "torch": "2.12.0"}}},
            "rank 3 on node2 has torch 2.12.0, the other 3 have torch 2.13.0; install the same on every node",
        ),
        (
            {2: {"code": {"train.py": "a", "src/net.py": "c", "new.py": "d"}}},
            "rank 2 on node2 has another src/net.py, another new.py than the other 3; "
            "bring the code of every node to the same state",
        ),
        (
            {0: {"config": {"seed": "2"}}, 1: {"config": {"seed": "2", "lr": "1"}}, 3: {"config": {"seed": "2"}}},
            "rank 1 on node1 has lr=1, most have no lr; give every process the same overrides",
        ),
        (
            {2: {"sees_run_directory": False}, 3: {"sees_run_directory": False}},
            "2 ranks on node2 do not see what rank 0 writes to the run directory; put it where every node sees it",
        ),
    ],
    ids=["versions", "code", "config", "run directory"],
)
def test_the_odd_ones_are_named_with_what_they_have(changed: dict[int, dict[str, object]], told: str) -> None:
    assert difference([replace(one, **changed.get(one.rank, {})) for one in FOUR]) == told


def test_those_that_agree_are_told_nothing() -> None:
    assert difference(FOUR) is None
