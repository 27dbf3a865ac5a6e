"""Variables of launchers that mean nothing, or came without the others: a line each, or a run that is right."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
from lightning.fabric.utilities.rank_zero import _get_rank

from lightswitch import versions
from lightswitch.cluster import environments, placement
from lightswitch.errors import RefusedRequest
from lightswitch.preflight import devices, environment
from tests.engine.cluster.test_placement import BATCH_SHELL, EXPORTED, SRUN, TORCHRUN
from tests.engine.config.mistaken import Answer, answers
from tests.engine.conftest import CHECKOUT, PLAIN

PORT = "expected a port from 1 to 65535; set a valid value, or type unset MASTER_PORT"
FROM_0, FROM_1 = "expected a whole number from 0", "expected a whole number from 1"
ALL = "export RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT for each process"
RENDEZVOUS = "MASTER_ADDR=localhost MASTER_PORT=29500"
PAIR = f"{RENDEZVOUS} WORLD_SIZE=2"
STEP = "SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_NTASKS=4"
TASK = f"SLURM_NODELIST=node[1-2] SLURM_JOB_ID=7 {STEP}"
AGENT = f"TORCHELASTIC_RUN_ID=none {PAIR} RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2"
UNEVEN_TASKS = "SLURM_STEP_TASKS_PER_NODE=3,1"
UNEVEN = f"{RENDEZVOUS} WORLD_SIZE=3 LOCAL_WORLD_SIZE=2 GROUP_WORLD_SIZE=3"
REFUSED = {
    "MASTER_PORT=99999": f"MASTER_PORT: found '99999', {PORT}",
    "MASTER_PORT=abc": f"MASTER_PORT: found 'abc', {PORT}",
    "MASTER_PORT=-1": f"MASTER_PORT: found '-1', {PORT}",
    "MASTER_PORT=0": f"MASTER_PORT: found '0', {PORT}",
    "MASTER_PORT=": f"MASTER_PORT: found '', {PORT}",
    "MASTER_PORT=29500.5": f"MASTER_PORT: found '29500.5', {PORT}",
    "STANDALONE_PORT=x": "STANDALONE_PORT: found 'x', expected a port from 1 to 65535",
    "MASTER_ADDR=": "MASTER_ADDR: found '', expected a host's name or address; set a valid value, or type",
    "LOCAL_RANK=abc": f"LOCAL_RANK: found 'abc', {FROM_0}; set a valid value, or type unset LOCAL_RANK",
    "LOCAL_RANK=-1": f"LOCAL_RANK: found '-1', {FROM_0}",
    "LOCAL_RANK=1": "LOCAL_RANK=1: there is no RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; type unset LOCAL_RANK, or",
    "LOCAL_RANK=0": "LOCAL_RANK=0: there is no RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
    "RANK=1": "RANK=1: there is no WORLD_SIZE, MASTER_ADDR, MASTER_PORT; type unset RANK, or ",
    "RANK=-1": f"RANK: found '-1', {FROM_0}",
    "RANK=0x1": f"RANK: found '0x1', {FROM_0}",
    "RANK=0 WORLD_SIZE=2": "RANK=0 and WORLD_SIZE=2: there is no MASTER_ADDR, MASTER_PORT; type unset RANK WORLD_SIZE,",
    "WORLD_SIZE=abc": f"WORLD_SIZE: found 'abc', {FROM_1}",
    "WORLD_SIZE=0": f"WORLD_SIZE: found '0', {FROM_1}",
    "WORLD_SIZE=8": "WORLD_SIZE=8: there is no RANK, MASTER_ADDR, MASTER_PORT; type unset WORLD_SIZE, or ",
    f"{PAIR} RANK=2": "RANK=2 and WORLD_SIZE=2: export a RANK from 0 to 1",
    f"{PAIR} RANK=one": f"RANK: found 'one', {FROM_0}",
    "MASTER_ADDR=localhost WORLD_SIZE=2 RANK=0": "RANK=0 and WORLD_SIZE=2: there is no MASTER_PORT; export RANK, ",
    f"{PAIR} RANK=1 LOCAL_RANK=0": "RANK=1 and LOCAL_RANK=0: 2 processes on each of 1 nodes must be numbered node by",
    f"{AGENT} RANK=1": "RANK=1 and LOCAL_RANK=0: 2 processes on each of 1 nodes must be numbered node by node; start",
    f"{TASK} SLURM_NODEID=1": "SLURM_PROCID=1 and SLURM_NODEID=1 and SLURM_LOCALID=1: 2 processes on each of 2 nodes m",
    f"{PAIR} RANK=0 LOCAL_WORLD_SIZE=3": "LOCAL_WORLD_SIZE=3 and WORLD_SIZE=2: a node can't have more processes than",
    f"{RENDEZVOUS} WORLD_SIZE=3 RANK=0 LOCAL_WORLD_SIZE=2": "WORLD_SIZE=3 and LOCAL_WORLD_SIZE=2: nodes have differen",
    "NODE_RANK=x": f"NODE_RANK: found 'x', {FROM_0}",
    "NODE_RANK=1": "NODE_RANK=1: there is no MASTER_ADDR, MASTER_PORT; export them on each node, or type unset NODE_RA",
    f"{RENDEZVOUS} NODE_RANK=1": "NODE_RANK=1 and trainer.num_nodes=1: found a rank that is not in this run",
    f"{PAIR} NODE_RANK=0 LOCAL_RANK=1": "LOCAL_RANK=1 and trainer.devices=1: found a rank that is not in this run",
    f"{PAIR} NODE_RANK=0 LOCAL_RANK=2": "LOCAL_RANK=2 and WORLD_SIZE=2: export a LOCAL_RANK from 0 to 1",
    "GROUP_RANK=1": "GROUP_RANK=1: there is no RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; type unset GROUP_RANK, or ",
    "GROUP_RANK=x": f"GROUP_RANK: found 'x', {FROM_0}",
    "SLURM_PROCID=1": "SLURM_PROCID=1: srun started no other process of this run; type unset SLURM_PROCID",
    "SLURM_PROCID=x": f"SLURM_PROCID: found 'x', {FROM_0}",
    "OMPI_COMM_WORLD_SIZE=2": "OMPI_COMM_WORLD_SIZE=2: mpirun started 2 processes, and each would be a run of its own",
    "JSM_NAMESPACE_RANK=1": "JSM_NAMESPACE_RANK=1: jsrun started no other process of this run; type unset JSM_",
    "SLURM_STEP_NUM_TASKS=4": "SLURM_STEP_NUM_TASKS=4: there is no SLURM_STEP_NUM_NODES, SLURM_PROCID, SLURM_LOCALID, "
    "SLURM_NODEID, SLURM_NTASKS; start it with srun python train.py, or type unset SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_TASKS=many": f"SLURM_STEP_NUM_TASKS: found 'many', {FROM_1}",
    "SLURM_STEP_NUM_NODES=0": f"SLURM_STEP_NUM_NODES: found '0', {FROM_1}",
    f"{TASK} SLURM_NTASKS=8": "SLURM_NTASKS=8 and SLURM_STEP_NUM_TASKS=4: srun sets both to the same value; start",
    f"{TASK} SLURM_PROCID=4": "SLURM_PROCID=4 and SLURM_STEP_NUM_TASKS=4: export a SLURM_PROCID from 0 to 3",
    f"{TASK} SLURM_STEP_NUM_NODES=5": "SLURM_STEP_NUM_NODES=5 and SLURM_STEP_NUM_TASKS=4: a node has at least one task",
    f"{TASK} SLURM_STEP_NUM_NODES=3": "SLURM_STEP_NUM_TASKS=4 and SLURM_STEP_NUM_NODES=3: nodes have different n",
    f"{TASK} {UNEVEN_TASKS} SLURM_NODEID=1": "SLURM_STEP_NUM_TASKS=4 and SLURM_STEP_NUM_NODES=2 and SLURM_STEP_TAS",
    f"{UNEVEN} RANK=1 LOCAL_RANK=0 GROUP_RANK=1": "WORLD_SIZE=3 and LOCAL_WORLD_SIZE=2 and GROUP_WORLD_SIZE=3 and RANK",
    f"{TASK} SLURM_JOB_ID=abc": "SLURM_JOB_ID=abc: expected a number, which determines the port",
    STEP: "SLURM_STEP_NUM_NODES=2: there is no SLURM_NODELIST, for the first node",
    "SLURM_ARRAY_JOB_ID=7": "SLURM_ARRAY_JOB_ID=7: there is no SLURM_ARRAY_TASK_ID, which each task of an array has",
    "TORCHELASTIC_RUN_ID=none": "TORCHELASTIC_RUN_ID=none: there is no RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, "
    "MASTER_PORT; start it with torchrun --nproc-per-node=N train.py, or type unset TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE=True": "TORCHELASTIC_USE_AGENT_STORE=True: torchrun did not start this process; type",
    f"{AGENT} LOCAL_RANK=2": "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2: export a LOCAL_RANK from 0 to 1",
    f"{AGENT} GROUP_RANK=2 GROUP_WORLD_SIZE=2": "GROUP_RANK=2 and GROUP_WORLD_SIZE=2: export a GROUP_RANK from 0 to 1",
    "OMP_NUM_THREADS=abc": "OMP_NUM_THREADS: found 'abc', expected a number of threads from 1; set a valid value, or",
    "OMP_NUM_THREADS=0": "OMP_NUM_THREADS: found '0', expected a number of threads from 1",
    "CUDA_VISIBLE_DEVICES=all": "CUDA_VISIBLE_DEVICES: found 'all', expected numbers of GPUs such as 0,1, or their UUI",
    "CUDA_VISIBLE_DEVICES=0;1": "CUDA_VISIBLE_DEVICES: found '0;1', expected numbers of GPUs such as 0,1, or their UUI",
}
RIGHT = (
    *("MASTER_ADDR=node1", "MASTER_PORT=29500", RENDEZVOUS, "NODE_RANK=0", "OMP_NUM_THREADS=", "OMP_NUM_THREADS=4,2"),
    *(
        "CUDA_VISIBLE_DEVICES=",
        "CUDA_VISIBLE_DEVICES=-1",
        "CUDA_VISIBLE_DEVICES=0,1",
        "CUDA_VISIBLE_DEVICES=GPU-1a-2b,MIG-3/4",
    ),
    *("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=1", "SLURM_STEP_NUM_NODES=2", TASK, AGENT),
    f"{TASK} {UNEVEN_TASKS}",
    f"{UNEVEN} GROUP_WORLD_SIZE=2 RANK=1 LOCAL_RANK=0 GROUP_RANK=1",
    f"{UNEVEN} GROUP_WORLD_SIZE=2 RANK=1 LOCAL_RANK=1 GROUP_RANK=0",
    *(
        f"{PAIR} RANK=1",
        f"{PAIR} RANK=1 LOCAL_RANK=1",
        f"{PAIR} RANK=1 LOCAL_WORLD_SIZE=1",
        "TORCHELASTIC_RESTART_COUNT=x",
    ),
)


AT_PREFLIGHT = [variables for variables, line in REFUSED.items() if "trainer." in line or " started " in line]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    named = [*list(REFUSED)[::8], *AT_PREFLIGHT]
    commands = {variables: [*variables.split(), *PLAIN, "run_id=mine"] for variables in named}
    return answers(commands, tmp_path_factory.mktemp("environments"))


def test_junk_is_told_in_a_line_before_torch_is_imported(answered: dict[str, Answer]) -> None:
    assert AT_PREFLIGHT
    for variables, answer in answered.items():
        assert answer.err.startswith(f"error: {REFUSED[variables]}")
        assert (answer.err.count("\n"), answer.returncode, answer.imported, answer.left) == (1, 2, [], [])


@pytest.mark.parametrize("variables", [variables for variables in REFUSED if variables not in AT_PREFLIGHT])
def test_junk_is_told_with_what_was_expected_and_what_to_type(variables: str) -> None:
    (line,) = _answer(dict(variable.split("=", 1) for variable in variables.split()))
    assert line.startswith(REFUSED[variables])


@pytest.mark.parametrize("variables", RIGHT)
def test_what_means_something_is_taken_at_its_word(variables: str) -> None:
    assert _answer(dict(variable.split("=", 1) for variable in variables.split())) == []


CHILD = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
VALUES = (
    *("", " ", "0", "1", "2", "3", "8", "-1", "abc", "99999", "0.5", "1,2", "½", "³", "node1", "True"),
    *("1" * 5000, "a\nb"),
)
SPOKEN = sorted(
    {*TORCHRUN, *SRUN, *EXPORTED, *CHILD, "GROUP_WORLD_SIZE", "SLURM_NODELIST", "SLURM_STEP_TASKS_PER_NODE"}
)
SPOKEN += ["SLURM_NTASKS_PER_NODE", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "TORCHELASTIC_USE_AGENT_STORE"]
SPOKEN += ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "JSM_NAMESPACE_RANK", "STANDALONE_PORT"]


@pytest.mark.parametrize("seed", range(20))
def test_any_environment_is_refused_in_lines_or_is_a_place_in_a_run(seed: int) -> None:
    drawn, refused = random.Random(seed), 0
    for _ in range(150):
        whole = drawn.choice([{}, TORCHRUN, {**SRUN, "SLURM_NODELIST": "node[1-2]"}, EXPORTED, CHILD, BATCH_SHELL])
        environ = {name: value for name, value in whole.items() if drawn.random() > 0.1}
        environ |= {name: drawn.choice(VALUES) for name in drawn.sample(SPOKEN, drawn.choice((0, 1, 1, 2, 5)))}
        lines = _answer(environ)
        refused += bool(lines)
        for line in lines:
            assert "\n" not in line, environ
            assert any(name in line for name in SPOKEN) or " started " in line, (environ, line)
    assert 0 < refused < 150


def _answer(environ: Mapping[str, str]) -> list[str]:
    """The lines by which a process is refused; of one that is not, all that is read later means the same place."""
    os.environ.clear()  # the fixture `environment` puts it back
    os.environ.update(environ)
    try:
        environment.check()
    except RefusedRequest as mistakes:
        return mistakes.problems
    place = placement.detect()
    problems = list(devices.other_counts({"num_nodes": place.nodes, "devices": place.devices_per_node or 2}, place))
    if problems:
        return problems
    met = environments.detect()
    per_node = place.devices_per_node or 2
    assert 1 <= met.main_port < 2**16
    assert met.main_address.strip()
    assert (met.node_rank() == met.local_rank() == 0) == (place.rank == 0)
    assert not (_get_rank() and place.rank == 0)  # by which Lightning is silent
    if place.is_external:
        assert met.global_rank() == place.rank < met.world_size() == (place.uneven or place.nodes * per_node)
    if place.is_external and not place.uneven:
        assert met.node_rank() * per_node + met.local_rank() == place.rank
        met.validate_settings(num_devices=per_node, num_nodes=place.nodes)
    if place.uneven:
        assert met.node_rank() + met.local_rank() <= place.rank
        assert place.nodes - met.node_rank() + per_node - met.local_rank() - 1 <= place.uneven - place.rank
    return []


PAIRS = {  # torch, torchvision and the torch that it requires
    ("2.13.0", "0.28.0", "2.13.0"): None,
    ("2.13.0+cpu", "0.28.0+cpu", "2.13.0"): None,
    ("2.8.0a0+34c6371d24.nv25.8", "0.23.0a0+428a54c9", "2.8.0"): None,
    ("2.13.0+cpu", "0.28.0", "2.13.0"): "torchvision 0.28.0 is built for the PyPI build of torch, but torch "
    "2.13.0+cpu is installed; type pip install --force-reinstall --no-deps 'torchvision==0.28.*' "
    "--index-url https://download.pytorch.org/whl/cpu",
    ("2.13.0", "0.28.0+cu130", "2.13.0"): "torchvision 0.28.0+cu130 is built for the cu130 build of torch, but torch "
    "2.13.0 is installed; type pip install --force-reinstall --no-deps 'torchvision==0.28.*'",
    ("2.13.0", "0.27.1", "2.12.1"): "torchvision 0.27.1 is built for torch 2.12.1, but torch 2.13.0 is installed; type "
    "pip install --force-reinstall --no-deps 'torchvision==0.28.*'",
}


@pytest.mark.parametrize(("torch", "torchvision", "required"), PAIRS)
def test_a_torchvision_of_another_torch_is_told_in_a_line(torch: str, torchvision: str, required: str) -> None:
    requirements = ["numpy", f"torch=={required}", "pillow!=8.3.*,>=5.3.0"]
    told = [*environment.apart({"torch": torch, "torchvision": torchvision}, requirements)]
    assert told == list(filter(None, [PAIRS[torch, torchvision, required]]))


def test_packages_beyond_what_the_engine_is_for_are_told() -> None:
    told = versions.unmet(["torch<2.1,>=2", "torch>=2", "a-package-of-no-one>=9", "torch<1; extra == 'x'"])
    assert told == [f"torch {version('torch')}, expected torch<2.1,>=2"]


def test_a_folder_whose_name_a_config_would_take_for_a_reference_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "${x}").mkdir()
    monkeypatch.chdir(tmp_path / "${x}")
    with pytest.raises(RefusedRequest, match=r"has \$\{ in its name, which a config takes for a reference; rename it"):
        environment.check({})


LAUNCHED = {  # what `accelerate launch` of 1.15 exports, as far as it changes a run
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "True",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_CLIPPING": "1.0"}


@pytest.mark.parametrize(
    ("exported", "typed", "told"),
    [
        ({}, set(), ""),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, set(), "type precision=bf16-mixed"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, set(), "type precision=16-mixed"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"precision"}, ""),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}, set(), "type strategy=fsdp_offload"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "4"}, set(), "type strategy=fsdp_hybrid"),
        ({"FSDP_SHARDING_STRATEGY": "4"}, set(), ""),
        (DEEPSPEED, set(), "type strategy=deepspeed_stage_2 trainer.gradient_clip_val=1.0"),
        (DEEPSPEED, {"strategy", "trainer.gradient_clip_val"}, ""),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, set(), "type compile=true"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, set(), "type micro_batch_size=N, where N is "),
    ],
)
def test_what_accelerate_launch_exports_is_typed_or_told(exported: dict[str, str], typed: set[str], told: str) -> None:
    lines = list(environment.of_accelerate(typed, lambda: "cpu", LAUNCHED | exported))
    assert (len(lines), told in "".join(lines)) == (bool(told), True)
    assert len(list(environment.of_accelerate(set(), lambda: "cuda", LAUNCHED))) == 1  # accelerate launch --cpu


@pytest.mark.parametrize("start", [("train.py", "--help"), ("train.py", "strategy=ddp"), ("-m", "lightswitch.doctor")])
def test_windows_is_refused_in_one_line_by_every_start(start: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.platform = 'win32'\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *start], cwd=CHECKOUT, env=environ, capture_output=True, text=True)
    told = "error: found Windows, expected Linux or macOS; type wsl --install, and start it in WSL\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
