"""How a run scales with its devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightswitch.planning import scaling


def _estimate(nodes: int, seconds: float) -> dict[str, Any]:
    return {
        **{"nodes": nodes, "devices_per_node": 8, "replicas": 8 * nodes, "micro_batch": 2},
        **{"global_batch": 64, "accumulation": 4 // nodes, "bytes": 2**30, "usable_bytes": 2**31},
        **{"bound_by": "network", "least_seconds": {"network": seconds, "arithmetic": seconds / 2}},
        **{"bytes_within_node": 1e9, "bytes_between_nodes": 8e9},
    }


def _plan(folder: Path, name: str, nodes: int, seconds: float) -> Path:
    (folder / name).mkdir()
    file = folder / name / scaling.FILE
    file.write_text(json.dumps({"strategy": "fsdp", "estimate": _estimate(nodes, seconds)}))
    return file


def test_efficiency_is_of_a_device_against_the_least_world(tmp_path: Path) -> None:
    (line,) = scaling.read({_plan(tmp_path, "0", 2, 1.5): (), _plan(tmp_path, "1", 1, 2.0): ()})
    assert [(point.ranks, point.global_batch) for point in line.points] == [(8, 64), (16, 64)]
    assert line.efficiencies() == [1, pytest.approx(2.0 / (2 * 1.5))]  # 64 / 1.5 / 16 by 64 / 2 / 8
    assert line.points[0].received_bytes == 1e9 + 8e9 / 8  # what a node gets is shared by its devices
    rows = scaling.table(line).splitlines()
    assert rows[2].split() == ["16", "64", "2", "×", "2", "1", "yes", "1.5", "network", "2", "42.7", "67%"]


def test_jobs_that_differ_in_more_than_the_world_are_lines_of_their_own(tmp_path: Path) -> None:
    given = {
        _plan(tmp_path, f"{model}{nodes}", nodes, 2.0): [f"trainer.num_nodes={nodes}", f"model={model}", "seed=1"]
        for model in ("small", "large")
        for nodes in (1, 2)
    }
    lines = scaling.read(given)
    assert {line.strategy: len(line.points) for line in lines} == {"fsdp model=large": 2, "fsdp model=small": 2}
    assert [line.efficiencies() for line in lines] == [[1, 0.5], [1, 0.5]]
