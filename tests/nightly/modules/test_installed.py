"""A network, its batches and its loader of a package that lightswitch knows nothing of keep every promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.engine.conftest import CHECKOUT

GRAPHS = tuple(
    f"{node}._target_=tests.nightly.modules.graphs.{name}"
    for node, name in {"model": "Graphs", "data": "GraphData"}.items()
)


def test_a_network_of_torch_geometric_keeps_every_promise_under_every_strategy(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", packages, "torch_geometric"]
    subprocess.run(install, check=True)
    words = (*GRAPHS, "mode=check", "check.strategies=all", "trainer.accelerator=cpu", "run_id=mine")
    command = [sys.executable, CHECKOUT / "train.py", *words]
    paths = {"PYTHONPATH": f"{packages}{os.pathsep}{CHECKOUT}"}
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **paths}, check=False)
    ways = json.loads((tmp_path / "runs/graphs/mine/check.json").read_text())["ways"]
    kept = {way: {cell["status"] for cell in row["cells"].values()} for way, row in ways.items()}
    assert kept.pop("fsdp_tp") == {"refused"}  # it has no plan
    assert len(kept) > 10
    assert set().union(*kept.values()) == {"holds", "none"}
