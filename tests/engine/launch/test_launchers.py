"""Two processes, started by each launcher for real: one run, in one run directory."""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightswitch.errors import ExitCode
from lightswitch.failures.launchers import Scripts
from lightswitch.launch import spawn
from lightswitch.process import Process, Signals
from tests.engine.conftest import PLAIN, Finished, Train, context
from tests.engine.failures.pace import FAILS_ONCE
from tests.engine.launch.witness import WITNESS, witnesses
from tests.engine.plain import PlainModel
from tests.engine.processes import TRAIN_PY, Start, said
from tests.night import at_night
from tests.runs import CHECKOUT

RUN = (*PLAIN, *WITNESS, "trainer.accelerator=cpu", "trainer.max_steps=4", "trainer.val_check_interval=4")
TIMEOUT_SECONDS = 800


class Wandering(PlainModel):
    """Changes the working directory, as code does that unpacks data or calls a tool."""

    def __init__(self, to: str | None = None) -> None:
        super().__init__()
        if to is not None:
            os.chdir(to)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (("train.py",), ("hydra.job.chdir=true",)),
        *at_night((("-m", "cProfile", "-o", "profile", "train.py"), ("model.to=/",))),  # and user code moves elsewhere
    ],
)
def test_ranks_start_as_the_script_did_whoever_ran_it_and_wherever_it_went(
    script: tuple[str, ...], words: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    for name in ("conf", "train.py"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    own = ("model._target_=tests.engine.launch.test_launchers.Wandering", RUN[1])
    own = (*own, "trainer.accelerator=cpu", "trainer.max_steps=2", "trainer.val_check_interval=2", "logger=csv")
    own = (*own, "strategy=ddp", "trainer.devices=2", "run_id=mine", *words)
    ended = start("python", *script, *own)
    out = said(ended)
    assert ended.returncode == 0, out
    (evaluate,) = re.findall(r"^evaluate   (.+) mode=test ckpt_path=(.+)$", out, re.MULTILINE)
    assert evaluate[0].startswith("python train.py model.")
    assert evaluate[1] == "runs/wandering/mine/checkpoints/best.ckpt"
    assert (tmp_path / evaluate[1]).exists()


def test_torchrun_decides_the_number_of_devices(train: Train) -> None:
    refused = train(*RUN, "trainer.devices=3", "global_batch_size=66", ranks=2, check=False)
    line = (
        "error: torchrun started 1 node × 2 processes, but the trainer has num_nodes=1, devices=3; "
        "start it with --nproc-per-node=3, or leave both out to train on what was started\n"
    )
    assert (refused.returncode, refused.err) == (2, line)  # told by one of the two
    assert not (refused.folder / "runs").exists()


SLURM = (
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_NTASKS=2 SLURM_JOB_ID=7 "
    "SLURM_NODELIST=node[1-2] SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0 trainer.num_nodes=2 trainer.devices=2"
)
UNEVEN = "MASTER_ADDR=localhost MASTER_PORT=1 WORLD_SIZE=3 RANK=0 LOCAL_WORLD_SIZE=2"
TORCHRUN = (
    "TORCHELASTIC_RUN_ID=none WORLD_SIZE=2 GROUP_WORLD_SIZE=2 GROUP_RANK=1 RANK=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "
    "MASTER_ADDR=localhost MASTER_PORT=1"
)
REFUSED = {  # what launchers have exported and what is typed, and the line
    SLURM: "slurm started 2 nodes × 1 process, but the trainer has num_nodes=2, devices=2; start it with "
    "--ntasks-per-node=2, or leave both out to train on what was started",
    TORCHRUN: "torchrun without --rdzv-id: the run could not be found again when torchrun starts its processes again; "
    "type --rdzv-id=NAME, or give each process the same run_id=NAME",
    UNEVEN: "RANK=0 and WORLD_SIZE=3 and LOCAL_WORLD_SIZE=2 and MASTER_PORT=1 and MASTER_ADDR=localhost: expected one "
    "rank's RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, with ranks numbered from 0, node by node, and as many on each "
    "node; export RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT for each process, or type unset RANK WORLD_SIZE "
    "LOCAL_WORLD_SIZE MASTER_PORT MASTER_ADDR",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_processes_that_make_no_run_are_refused_in_a_line(typed: str, train: Train) -> None:
    exported = dict(word.split("=", 1) for word in typed.split() if word[0].isupper())
    words = [word for word in typed.split() if word[0].islower()]
    assert train(*words, *RUN, environment=exported, check=False).err == f"error: {REFUSED[typed]}\n"


BY_HAND = (*RUN, "strategy=ddp", "num_nodes=2", "cluster=manual", "cluster.main_address=localhost")
UNMET = {  # by the number of the node that is started alone
    0: "error: rank 1 of 2 did not connect to localhost:{port} in 1 s; check that all",
    1: "rank 1 on {host} could not reach rank 0 at localhost:{port} in 1 s: ",
}


@pytest.mark.parametrize("node", [0, *at_night(1)])
def test_ranks_that_do_not_meet_are_named(node: int, train: Train, port: str) -> None:
    place = (f"cluster.node_rank={node}", f"cluster.main_port={port}", "meet_timeout_seconds=1", "run_id=mine")
    alone = train(*BY_HAND, *place, check=False)
    assert alone.returncode == 2
    assert UNMET[node].format(port=port, host=socket.gethostname()) in alone.err


def test_a_port_in_use_is_told_with_what_to_type(train: Train) -> None:
    with socket.create_server(("localhost", 0)) as other:
        used = other.getsockname()[1]
        refused = train(*BY_HAND, "cluster.node_rank=0", f"cluster.main_port={used}", check=False)
    assert refused.returncode == 2
    assert refused.err == (
        f"error: port {used} of {socket.gethostname()} is in use; set another for every process: "
        f"cluster.main_port={used + 1} with cluster=manual, else MASTER_PORT={used + 1}\n"
    )


def started_in_two(train: Train, folder: Path, *of_each: tuple[tuple[str, ...], dict[str, str]]) -> list[Finished]:
    """Run commands, each with variables of its own, at the same time in two terminals."""
    (first, environment), (second, of_second) = of_each
    others: list[Finished] = []
    run = partial(train, folder=folder, check=False)
    ended = run(*first, environment=environment, meanwhile=lambda _: others.append(run(*second, environment=of_second)))
    return [ended, *others]


@pytest.mark.parametrize("way", ["manual", *at_night("variables")])
def test_two_machines_can_be_started_by_hand(way: str, train: Train, tmp_path: Path, port: str) -> None:
    def of(node: int) -> tuple[tuple[str, ...], dict[str, str]]:
        if way == "manual":
            return (*BY_HAND, f"cluster.main_port={port}", f"cluster.node_rank={node}"), {}
        words = (*RUN, "strategy=ddp", "num_nodes=2", "trainer.devices=1")
        return words, {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "NODE_RANK": str(node)}

    both = started_in_two(train, tmp_path, of(0), of(1))
    assert [it.err for it in both] == ["", ""]
    seen = witnesses(the_run(tmp_path))
    assert [place["node_rank"] for place in seen] == [0, 1]
    assert {place["cluster"] for place in seen} == {"LocalEnvironment"}
    assert [it.out.count("strategy   DDP, precision 32-true, 2 nodes × 1 CPU") for it in both] == [1, 0]


@pytest.mark.nightly
def test_processes_can_be_started_one_by_one(train: Train, tmp_path: Path, port: str) -> None:
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    both = started_in_two(train, tmp_path, *((RUN, {**meet, "RANK": rank}) for rank in "01"))
    seen = witnesses(the_run(tmp_path))
    assert [(place["world_size"], place["local_rank"], place["strategy"]) for place in seen] == [
        (2, 0, "DDP"),
        (2, 1, "DDP"),
    ]
    assert ["strategy   DDP" in it.out for it in both] == [True, False]
    told = [line for line in both[0].out.splitlines() if line.startswith(("go on ", "evaluate "))]
    assert {re.sub(" +", " ", line[:17]) for line in told} == {"evaluate python", "go on python"}
    assert seen[1]["cluster"] == "ExportedEnvironment"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        pytest.param(
            ("trainer.devices=3",),
            "env started 1 node × 2 processes, but the trainer has num_nodes=1, devices=3; ",
            id="each by itself",
            marks=pytest.mark.nightly,
        ),
        pytest.param(("seed={rank}",), "rank 1 on {host} has seed=1, rank 0 on {host} has seed=0; ", id="all together"),
    ],
)
def test_a_refused_start_prints_its_line_in_each_terminal(
    words: tuple[str, ...], line: str, train: Train, tmp_path: Path, port: str
) -> None:
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    typed = (((*RUN, *(word.format(rank=rank) for word in words)), {**meet, "RANK": rank}) for rank in "01")
    both = started_in_two(train, tmp_path, *typed)
    assert both[0].refusal == both[1].refusal
    assert both[0].refusal.startswith(line.format(host=socket.gethostname()))


@pytest.mark.nightly
def test_spawned_ranks_print_the_commands_that_were_typed(start: Start, tmp_path: Path) -> None:
    typed = (*RUN, "strategy=ddp_spawn", "trainer.devices=2")
    lines = finish(start("python", TRAIN_PY, *typed)).splitlines()
    (run_dir,) = (tmp_path / "runs").glob("*/*")
    words = (*(word for word in typed if not word.startswith("trainer.max_steps=")), f"run_id={run_dir.name}")
    (go_on,) = (shlex.split(line)[2:] for line in lines if line.startswith("go on "))
    assert go_on == ["python", TRAIN_PY, *words, "trainer.max_steps=8"]
    assert [place["environment"] for place in witnesses(run_dir)] == [[rank, rank, "2", "2"] for rank in "01"]


def test_a_spawned_rank_starts_loader_workers_as_any_script_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Linux by fork: spawned ones would import torch again, and a data set could hold no lambda."""
    monkeypatch.chdir(tmp_path)
    Path("shows.py").write_text("import multiprocessing; open('shown', 'w').write(multiprocessing.get_start_method())")
    arguments = (0, 1, 29500, ["python", "shows.py"], ["shows.py"])
    rank = multiprocessing.get_context("spawn").Process(target=spawn._rank, args=arguments)
    rank.start()
    rank.join(TIMEOUT_SECONDS)
    assert rank.exitcode == 0
    assert Path("shown").read_text() == multiprocessing.get_start_method()


@pytest.mark.parametrize("options", [["-c"], *at_night(["-i", "-c"])], ids=["another script", "an interactive shell"])
def test_main_is_refused_elsewhere_with_what_runs_there(options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, *options, f"import sys; sys.path[0] = {str(CHECKOUT)!r}; import train; train.main()"]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stderr.startswith("error: a run starts as a script, in a process of its own; in place of main(), type ")
    assert "type lightswitch.train('strategy=ddp', …), or in a notebook !python train.py" in done.stderr


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, out
    return out


def the_run(folder: Path) -> Path:
    """The one run directory, with one configuration and one log."""
    (run_dir,) = folder.glob("runs/*/*")
    assert len(list(folder.rglob(".hydra"))) == 1
    log = (run_dir / "train.log").read_text()
    assert len([line for line in log.splitlines() if "strategy   " in line]) == 1
    assert (run_dir / "metrics.csv").exists()
    assert (run_dir / "checkpoints" / "last.ckpt").exists()
    return run_dir


@pytest.mark.parametrize(("received", "code"), [(signal.SIGINT, 0), (None, -signal.SIGTERM)], ids=["it", "none"])
def test_the_signal_that_has_ended_a_rank_ends_rank_0_where_it_gets_none(
    received: signal.Signals | None, code: int, tmp_path: Path
) -> None:
    observing = context.Process(target=_observe_a_stopped_rank, args=(received, tmp_path / "err"))
    observing.start()
    observing.join(timeout=300)
    assert observing.exitcode == code
    assert (tmp_path / "err").read_text() == ""


def _observe_a_stopped_rank(received: signal.Signals | None, told: Path) -> None:
    sys.stderr = told.open("w")
    process = Process()
    signals = Signals(process)
    run: Any = SimpleNamespace(process=process, signals=signals)
    launcher = Scripts(LightningEnvironment(), 2, 1, run)
    launcher.procs.append(subprocess.Popen([sys.executable, "-c", f"raise SystemExit({ExitCode.STOPPED})"]))
    process.ranks[:] = launcher.procs
    launcher.procs[0].wait()
    # it sleeps once it has seen that the rank is gone: then comes the signal
    time.sleep = lambda _: setattr(signals, "received", received)
    launcher._observe()


# torchrun with real agents

COMMAND = ("python", "-m", "torch.distributed.run")


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_that_agents_restart_goes_on_where_it_stood(
    nodes: int, start: Start, train: Train, tmp_path: Path, port: str
) -> None:
    """Agents of two nodes, which are given no id of the run, or one of both processes."""
    place = (f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}")
    place += ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--max-restarts=1")
    place += ("--rdzv-id=mine",) if nodes == 1 else ()
    run = (*RUN, "trainer.max_steps=8", "trainer.log_every_n_steps=1")
    fails = (FAILS_ONCE, "callbacks.fails.step=5")
    agents = [start(*COMMAND, *place, TRAIN_PY, *run, *fails) for _ in range(nodes)]
    out = "".join(finish(agent) for agent in agents)
    assert "RuntimeError: a passing fault" in out
    restarted, uninterrupted = Finished(0, out, "", tmp_path), train(*run, "strategy=single")
    assert f"resumes    runs/plainmodel/{restarted.run_dir.name}/checkpoints/best.ckpt, at step 4" in out
    assert restarted.column("train/loss") == pytest.approx(uninterrupted.column("train/loss"), abs=1e-5)


# torchrun's other ways: alone, and by agents that are told their rank


LAUNCH = ("python", "-m", "torch.distributed.launch")  # its older name


@pytest.mark.nightly
def test_standalone_it_starts_one_run(start: Start, tmp_path: Path) -> None:
    out = finish(start(*COMMAND, "--standalone", "--nproc-per-node=2", TRAIN_PY, *RUN))
    run_dir = the_run(tmp_path)
    first, second = witnesses(run_dir)
    assert [first["local_rank"], second["local_rank"]] == [0, 1]
    assert (first["world_size"], first["strategy"], first["cluster"]) == (2, "DDP", "TorchElasticEnvironment")
    assert out.count("strategy   DDP, precision 32-true, 1 node × 2 CPU") == 1
    assert f"\nevaluate   torchrun --standalone --nproc-per-node=2 {TRAIN_PY} model._target_=" in out


@pytest.mark.nightly
def test_agents_that_are_told_their_rank_start_one_run(start: Start, tmp_path: Path, port: str) -> None:
    place = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=localhost", f"--master-port={port}")
    run = (TRAIN_PY, *RUN, "run_id=mine")
    agents = [start(*command, *place, f"--node-rank={rank}", *run) for rank, command in enumerate((LAUNCH, COMMAND))]
    outs = [finish(agent) for agent in agents]
    assert [seen["node_rank"] for seen in witnesses(the_run(tmp_path))] == [0, 1]
    assert [out.count("strategy   DDP, precision 32-true, 2 nodes × 1 CPU") for out in outs] == [1, 0]
