"""docs/examples/cloud is what its schemas allow, and starts one run, which goes on after it was preempted."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet, TrainerV1alpha1TrainJob

from tests.engine.conftest import CHECKOUT, Finished, Train
from tests.engine.failures.pace import PACE_TARGET
from tests.engine.launch.test_launchers import finish
from tests.engine.processes import Start
from tests.engine.slurm.jobs import RUN as PLAIN_RUN

STEPS = 60
RUN = (*PLAIN_RUN, "trainer.accelerator=cpu", "global_batch_size=24", f"trainer.max_steps={STEPS}")
RUN += ("trainer.log_every_n_steps=1", "trainer.val_check_interval=20")
PACE = (PACE_TARGET, "callbacks.pace.seconds=1")
CLOUD = CHECKOUT / "docs" / "examples" / "cloud"


def read(name: str) -> Any:
    return yaml.safe_load((CLOUD / f"{name}.yaml").read_text())


@pytest.mark.parametrize(("name", "model"), [("jobset", JobsetV1alpha2JobSet), ("trainjob", TrainerV1alpha1TrainJob)])
def test_manifests_of_kubernetes_are_what_their_schemas_allow(name: str, model: Any) -> None:
    """The models drop keys that they do not know."""
    assert model.from_dict(read(name)).to_dict() == read(name)


def containers(job: Any) -> dict[str, Any]:
    """Return the one container of each replicated job."""
    pods = {one["name"]: one["template"]["spec"]["template"]["spec"] for one in job["spec"]["replicatedJobs"]}
    return {name: pod["containers"][0] for name, pod in pods.items()}


class Pods:
    """What a manifest starts on two nodes, with one process each and all of them on this machine."""

    def __init__(self, name: str, folder: Path, python: Path, port: str, start: Start) -> None:
        self.name, self.folder, self.port, self.start = name, folder, port, start
        torchrun = folder / "bin/torchrun"  # as the script that torch installs
        torchrun.parent.mkdir()
        torchrun.write_text(f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n')
        torchrun.chmod(0o755)
        self.path = {"PATH": f"{torchrun.parent}:{python.parent}:/usr/bin:/bin"}
        for source in ("train.py", "conf"):
            (folder / source).symlink_to(CHECKOUT / source)
        if name == "jobset":
            store = containers(read("jobset"))["store"]
            start(*store["command"], *(word.replace("29500", port) for word in store["args"]), **self.path)

    def begin(self, *words: str) -> list[subprocess.Popen[str]]:
        return [getattr(self, self.name)(rank, words) for rank in (0, 1)]

    def jobset(self, rank: int, words: tuple[str, ...]) -> subprocess.Popen[str]:
        node = containers(read("jobset"))["node"]
        exported = {one["name"]: one["value"] for one in node["env"]}
        store, _, port = exported["PET_RDZV_ENDPOINT"].rpartition(":")
        assert (store, port) == ("lightswitch-store-0-0.lightswitch", "29500")
        here = {"PET_RDZV_ENDPOINT": f"localhost:{self.port}", "PET_NPROC_PER_NODE": "1"}
        return self.start(*node["command"], *node["args"], *words, **exported | here | self.path)

    def trainjob(self, rank: int, words: tuple[str, ...]) -> subprocess.Popen[str]:
        """With the variables of Kubeflow's runtime for torch."""
        trainer = read("trainjob")["spec"]["trainer"]
        exported = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
        exported |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": self.port}
        return self.start(*trainer["command"], *trainer["args"], *words, **exported | self.path)

    def skypilot(self, rank: int, words: tuple[str, ...]) -> subprocess.Popen[str]:
        """With SkyPilot's own variables, from which its script makes torchrun's."""
        task = read("skypilot")
        (self.folder / "shared").mkdir(exist_ok=True)
        script = task["run"].replace("/opt/code", str(self.folder)).replace("/mnt/runs", str(self.folder / "shared"))
        script = f"{script.replace('29500', self.port).rstrip()} {shlex.join(words)}"
        exported = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
        exported |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NODE_RANK": str(rank)}
        exported |= {"SKYPILOT_TASK_ID": "lightswitch"}  # the run's id follows
        return self.start("bash", "-c", script, **task["envs"] | exported | self.path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["trainjob", "jobset", "skypilot"])
def test_what_a_manifest_starts_saves_when_it_is_preempted_and_goes_on(
    name: str, tmp_path: Path, python: Path, port: str, start: Start, train: Train
) -> None:
    pods = Pods(name, tmp_path, python, port, start)
    run_dir = tmp_path / "runs/plain/lightswitch"
    preempted = pods.begin(*RUN, *PACE)
    end = time.monotonic() + 800
    while not (run_dir / "metrics.csv").exists():
        assert time.monotonic() < end
        time.sleep(0.2)
    for agent in preempted:
        agent.send_signal(signal.SIGTERM)
    saved = [agent.communicate(timeout=800)[0] for agent in preempted]
    assert "stopped    by SIGTERM" in "".join(saved)
    again = "".join(finish(agent) for agent in pods.begin(*RUN))
    assert "resumes    runs/plain/lightswitch/checkpoints/" in again
    spread, alone = Finished(0, again, "", tmp_path, "lightswitch"), train(*RUN, "strategy=single")
    assert spread.column("train/loss") == pytest.approx(alone.column("train/loss"), abs=1e-5)
