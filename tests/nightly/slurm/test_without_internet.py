"""Nodes without internet, and the image of a container: made by its own commands, and from a wheelhouse alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lightswitch.regular_files import make_tree, remove_tree
from tests.engine.conftest import CHECKOUT
from tests.engine.slurm import jobs
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, submit, with_site
from tests.engine.test_pins import of_apptainer
from tests.project.examples.test_text_shards import save_tokenizer

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

# nobody listens at this port
WITHOUT_INTERNET = """
export WANDB_MODE=offline HF_HUB_OFFLINE=1 HF_HOME=$PWD/huggingface
export HTTP_PROXY=http://localhost:9 HTTPS_PROXY=http://localhost:9
"""


def test_nodes_without_internet_train_by_the_cache_and_leave_what_wandb_uploads_later(
    slurm_cluster: Cluster, checkout: Path
) -> None:
    """Which the nodes of the cluster are: they reach one another alone. A proxy does not get between the ranks."""
    repository = checkout / "huggingface/hub/models--mine--words"
    for folder in ("refs", "snapshots/1"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs/main").write_text("1")
    (checkout / "words.jsonl").write_text('{"text": "one two three four"}\n' * 9000)
    size = save_tokenizer(repository / "snapshots/1/tokenizer.json")
    with_site(checkout, f"{WITHOUT_INTERNET}python=({sys.executable})\n")  # which has all extras
    words = ("data=text_shards", "data.sources=[words.jsonl]", "data.tokenizer=mine/words", f"model.vocab_size={size}")
    short = ("trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "model.layers=1")
    options = {"nodes": 2, "ntasks_per_node": 1}
    script = SLURM / "torchrun.sh"
    run = ("model=gpt", *words, *short, "logger=[default,wandb]")
    job = submit(slurm_cluster, script, *run, cwd=checkout, no_requeue=True, **options)
    assert job.wait() == "COMPLETED", job.output()
    run_dir = checkout / "runs/gpt" / job.id
    assert (run_dir / "results.json").is_file()
    (offline,) = run_dir.glob("wandb/offline-run-*")
    sync = [sys.executable, "-m", "wandb", "sync", "--dry-run", str(offline)]
    found = subprocess.run(sync, cwd=checkout, check=True, capture_output=True, text=True).stderr
    assert f"{offline.name}/run-{job.id}.wandb" in found


# what apptainer does: the image's root and environment, with some paths of outside; OUTSIDE:INSIDE, or one for both
CONTAINED = """\
#!/bin/sh -eu
exec unshare --mount sh -euc '
  for path in /proc /dev /etc/hosts /etc/nsswitch.conf {bound}; do
    outside=${{path%%:*}} inside={root}${{path##*:}}
    [ -e "$inside" ] || if [ -d "$outside" ]; then mkdir -p "$inside"; else touch "$inside"; fi
    mount --rbind "$outside" "$inside"
  done
  exec chroot {root} sh -euc "cd \\"\\$0\\" && . /environment && exec \\"\\$@\\"" "$PWD" "$@"
' sh "$@"
"""


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Path]:
    """A root of the image's base."""
    if shutil.which("debootstrap") is None:
        required = os.environ.get("LIGHTSWITCH_REQUIRE_ALL") == "1"
        (pytest.fail if required else pytest.skip)("not installed: debootstrap")
    root = make_tree(tmp_path / "root")
    suite = of_apptainer().base.removeprefix("debian:").removesuffix("-slim")
    subprocess.run(["debootstrap", "--variant=minbase", suite, str(root)], check=True, capture_output=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    yield root
    remove_tree(root)  # gigabytes


def test_an_image_made_by_its_commands_and_again_from_a_wheelhouse_trains_on_nodes(
    bare: Path, slurm_cluster: Cluster, checkout: Path, tmp_path: Path
) -> None:
    image = of_apptainer()
    for to, source in image.copied.items():
        inside = bare / to.lstrip("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (CHECKOUT / source).is_dir() else shutil.copy
        copy(CHECKOUT / source, inside)
    (bare / "environment").write_text("".join(f"export {name}={value}\n" for name, value in image.exported.items()))
    settings, enter = pip_of_this_machine(), contained(tmp_path / "enter", bare, "/:/host")
    run_in(enter, "\n".join(image.commands), settings)
    run_in(enter, "cd /opt/code && make wheelhouse && mv .venv old", settings)
    run_in(enter, "cd /opt/code && make .venv/installed EXTRAS=all WHEELHOUSE=wheelhouse", {}, "unshare", "--net")

    container = contained(tmp_path / "container", bare, str(CHECKOUT), str(checkout))
    with_site(checkout, f"python=({container} python)\n")
    short = ("trainer.max_steps=2", "trainer.val_check_interval=2", "strategy=ddp")
    job = submit(slurm_cluster, SLURM / "multinode.sh", *jobs.RUN, *short, cwd=checkout, nodes=2, ntasks_per_node=1)
    assert job.wait() == "COMPLETED", job.output()
    told = json.loads((checkout / "runs/plain" / job.id / "run.json").read_text())
    assert told["command"].startswith("/opt/code/.venv/bin/python ")


def pip_of_this_machine() -> dict[str, str]:
    """Return how pip reaches its index here, as variables; what is a path here is below /host there."""
    told = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    found = re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", told, re.MULTILINE)
    return {
        f"PIP_{key.upper().replace('-', '_')}": re.sub(r"(^|(?<=\s)|file://)/", r"\1/host/", value)
        for key, value in found
    }


def contained(file: Path, root: Path, *bound: str) -> Path:
    file.write_text(CONTAINED.format(root=root, bound=" ".join(bound)))
    file.chmod(0o755)
    return file


def run_in(enter: Path, commands: str, environment: Mapping[str, str], *wrapper: str) -> None:
    """Run a script in a container as root, that of `apptainer build`."""
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", **environment}
    command = [*wrapper, str(enter), "sh", "-euxc", f"export PATH={environ['PATH']}\n{commands}"]
    done = subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
