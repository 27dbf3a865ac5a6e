"""Machines with network and processes of their own, without a scheduler: where torchrun's agents live and die."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.engine.conftest import CHECKOUT
from tests.engine.slurm.cluster import Cluster

PROGRAMS = ("ip", "mount", "nsenter", "setpriv", "unshare")


class Machines(Cluster):
    """Running machines: head, which trains nothing, and node1, node2, …, wired as those of a Slurm cluster are."""

    head_script = Cluster.head_script.partition("munged")[0] + "touch up\nexec sleep infinity\n"
    node_script = Cluster.node_script.partition("exec slurmd")[0] + "touch up{node}\nexec sleep infinity\n"

    def start(self, node: int, *command: str, cwd: Path, output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on a node, or on the head, which is number 0."""
        target = self.first_pids[f"node{node}" if node else "head"]
        inside = ["nsenter", f"--target={target}", "--all", f"--wdns={cwd}"]
        paths = f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}"
        environ = {name: os.environ[name] for name in ("PATH", "HOME")} | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        with output.open("ab") as file:
            return subprocess.Popen(
                [*inside, *command], env=environ | environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def _is_up(self) -> bool:
        return all((self.root / f"up{node}").exists() for node in self.nodes)

    def _head_answers(self) -> bool:
        return (self.root / "up").exists()
