"""`python train.py -m …`: each job is a run of its own."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from lightswitch.cluster import placement
from lightswitch.config.overrides import normalised
from lightswitch.launch.hydra_entry import register_resolvers
from lightswitch.preflight import devices
from lightswitch.sweeps import record
from lightswitch.sweeps.job import Pool
from lightswitch.sweeps.multirun import go_on, shared_problems, slots
from tests.engine.config.mistaken import answers
from tests.engine.conftest import CHECKOUT, PLAIN, PLAIN_DATA
from tests.engine.launch.witness import WITNESS, witnesses
from tests.engine.tiny import LANGUAGE_MODEL, TEXT
from tests.night import at_night

SHORT = ("trainer.accelerator=cpu", "trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.devices=2")
FAST = (*PLAIN, *WITNESS, *SHORT, "run_id=x", "logger=csv", "~callbacks.lr_monitor", "strategy=ddp")
SWEPT = (*PLAIN, "run_id=x")
RUNS = Path("runs/plainmodel/x")

Sweep = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script of tests/engine/sweeps/swept.py, with the project's own config beside it."""
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'src'}")
    monkeypatch.chdir(tmp_path)
    Path("conf").symlink_to(CHECKOUT / "conf")
    Path("swept.py").symlink_to(CHECKOUT / "tests/engine/sweeps/swept.py")
    return tmp_path / "swept.py"


@pytest.fixture
def sweep(swept: Path) -> Sweep:
    def run(*arguments: str, script: Path = swept, **environment: str) -> subprocess.CompletedProcess[str]:
        command, environ = ["python", str(script), "-m", *arguments], os.environ | environment
        streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        return subprocess.run(command, env=environ, timeout=1000, **streams)

    return run


def rows(out: str) -> list[list[str]]:
    """Of the table at the end."""
    table = re.split(r"^job +overrides.*$", out, flags=re.MULTILINE)[1]
    return [line.split() for line in table.strip().split("\n\n")[0].splitlines()]


def test_jobs_that_differ_only_in_seed_or_fold_get_their_mean_and_deviation() -> None:
    values = {"a": [0.1, 0.2, 0.3], "b": [0.5, 0.7, math.nan]}
    jobs = [
        record.Record(fold, [f"name={name}", "tags=[x]", f"data.fold={fold}"], "x", record.FINISHED, value)
        for name, found in values.items()
        for fold, value in enumerate(found)
    ]
    # mean and sample deviation by hand: 0.2, √((0.01 + 0 + 0.01) / 2) = 0.1; 0.6, √(0.02) = 0.14
    expected = ["", "val/loss 0.2 ± 0.1 over 3 jobs name=a", "val/loss 0.6 ± 0.14 over 2 jobs name=b"]
    assert record.means(jobs, "val/loss") == expected
    assert "\n\nval/loss 0.2 ± 0.1 over 3 jobs name=a\n" in record.table(jobs, "val/loss")
    assert record.means(jobs[:3], "val/loss") == ["", "val/loss 0.2 ± 0.1 over 3 jobs"]
    assert record.means(jobs[:1], "val/loss") == []


def test_a_sweep_runs_what_has_not_finished_and_leaves_a_directory_of_another_job(sweep: Sweep) -> None:
    jobs = ("name=one,broken_once", "seed=3")
    first, second = sweep(*SWEPT, *jobs), sweep(*SWEPT, *jobs)
    assert (first.returncode, second.returncode) == (1, 0), second.stderr
    assert rows(first.stdout) == [
        ["0", "name=one", "0.75", "finished", f"{RUNS}/0"],
        ["1", "name=broken_once", "-", "failed", f"{RUNS}/1"],
    ]
    assert "1 of 2 jobs failed\njob 1      RuntimeError: it is broken\n\ngo on      python " in first.stdout
    assert "job 0      has already finished" in second.stdout
    assert [row[-2] for row in rows(second.stdout)] == ["finished", "finished"]
    assert [(RUNS / number / "starts").read_text() for number in "01"] == ["RUN\n", "RUN\nRUN\n"]
    other = sweep(*SWEPT, "name=one,broken_once", "seed=4")
    told = f"error: {RUNS}/0 belongs to the job with seed=3; start this sweep under another run_id"
    assert (other.returncode, told in other.stderr) == (2, True), other.stderr


def test_jobs_are_told_apart_by_what_changes_their_runs() -> None:
    first = record.Record(0, ["++seed=1", "trainer.max_steps=5", "resume=never"], "x")
    assert first.of_another_job(["++seed=1", "trainer.max_steps=6", "tags=[again]"]) is None
    assert first.of_another_job(["++seed=2", "trainer.max_steps=5"]) == "seed=1"
    assert first.of_another_job(["trainer.gradient_clip_val=0.1"]) == "seed=1, no trainer.gradient_clip_val"
    second = replace(first, number=1, overrides=["++seed=2", "trainer.max_steps=5", "resume=never"])
    assert [row[1] for row in rows(record.table([first, second], "val/loss"))] == ["seed=1", "seed=2"]


@pytest.mark.nightly
def test_a_sweep_of_optuna_goes_on_after_objectives_that_are_not_finite(sweep: Sweep) -> None:
    (folder := Path("runs/nan/x/0")).mkdir(parents=True)
    overrides = ["seed=1", "name='nan'", "run_id=x"]
    record.write(record.Record(0, overrides, str(folder), record.FINISHED, objective=math.nan), folder)
    chosen = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "seed=choice(1)")
    done = sweep(*chosen, "name=nan", "run_id=x")
    assert "Traceback" not in done.stderr
    assert "job 0      has already finished" in done.stdout
    assert "the sweep ended early: No trials are completed yet." in done.stdout


def test_a_sweep_that_nohup_started_goes_on_when_its_terminal_closes(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Pool() as pool:
            ended: list[tuple[int, list[int]]] = []
            command = ["sh", "-c", f"kill -HUP {os.getpid()} $$"]
            pool.start(command, tmp_path, lambda exit_code, signals: ended.append((exit_code, signals)))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended == [(0, [])]


def test_jobs_run_at_once_each_in_its_slot_and_what_they_leave_behind_is_killed(tmp_path: Path) -> None:
    """Each of four waits until two have begun: one after another, they would wait for ever."""
    script = "echo $GPU; touch $$; sleep 3600 & until [ $(ls | wc -l) -ge 2 ]; do sleep 0.05; done"
    ended: list[int] = []
    with Pool([{"GPU": "0"}, {"GPU": "1"}]) as pool:
        for number in range(4):
            pool.wait(for_slot=True)
            output = tmp_path.with_name(f"{number}.txt")
            pool.start(["sh", "-c", script], tmp_path, lambda exit_code, _: ended.append(exit_code), output)
        pool.wait()
    assert ended == 4 * [0]
    outputs = [tmp_path.with_name(f"{number}.txt").read_text().strip() for number in range(4)]
    assert sorted(outputs[:2]) == ["0", "1"]
    sessions = {int(path.name) for path in tmp_path.iterdir()}
    deadline = time.monotonic() + 300
    while (left := _alive_in(sessions)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == [], "they would sleep for an hour"


def _alive_in(sessions: set[int]) -> list[psutil.Process]:
    found = (one for one in psutil.process_iter(["status"]) if one.info["status"] != "zombie")
    with contextlib.suppress(ProcessLookupError):
        return [one for one in found if os.getsid(one.pid) in sessions]
    return _alive_in(sessions)  # one has ended meanwhile


def test_slots_are_groups_of_the_gpus_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(**sweep: int) -> list[dict[str, str]]:
        return slots(OmegaConf.create({"sweep": sweep}))

    assert (of(), of(jobs_at_once=3)) == ([{}], [{}, {}, {}])
    monkeypatch.setattr(devices, "present", lambda: devices.Present(cuda=5))
    groups = [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert (of(devices_per_job=2), of(devices_per_job=2, jobs_at_once=1)) == (groups, groups[:1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setattr(devices, "present", lambda: devices.Present(cuda=2))
    assert [*map(str, of(devices_per_job=1))] == [str({"CUDA_VISIBLE_DEVICES": f"GPU-{one}"}) for one in "ab"]


def test_the_command_to_go_on_names_the_run_and_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    overrides = {
        "hydra": ["hydra.mode=MULTIRUN", "hydra/sweeper=optuna"],
        "task": ["seed=1,2", "model.api_key=hunter2"],
    }
    cfg = OmegaConf.create({"run_id": "mine", "hydra": {"overrides": overrides}})
    expected = "python train.py -m hydra/sweeper=optuna seed=1,2 'model.api_key=***' run_id=mine"
    assert go_on(cfg) == expected


@pytest.mark.nightly
def test_a_job_of_four_at_once_that_is_killed_is_run_again_by_the_printed_command(sweep: Sweep) -> None:
    first = sweep(*SWEPT, "sweep.jobs_at_once=2", "name=pair,pair_too,killed_once,one", "seed=3")
    assert first.returncode == 1, first.stderr
    assert [row[-2:] for row in rows(first.stdout)] == [
        [state, f"{RUNS}/{number}"] for number, state in enumerate(["finished", "finished", "failed", "finished"])
    ]
    assert f"job 0      finished, val/loss 0.75; its output: {RUNS}/0/output.txt\n" in first.stdout
    assert "job 2      killed by SIGKILL" in first.stdout
    (go_on,) = re.findall(r"^go on      python \S+swept.py -m (.*)$", first.stdout, re.MULTILINE)
    second = sweep(*shlex.split(go_on))
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("has already finished") == 3
    assert [row[-2] for row in rows(second.stdout)] == 4 * ["finished"]


# By night


@pytest.mark.nightly
def test_a_grid_trains_each_job_on_processes_of_its_own_and_is_compared(sweep: Sweep) -> None:
    done = sweep(*FAST, "global_batch_size=24,12,0", script=CHECKOUT / "train.py")
    assert done.returncode == 1, done.stderr
    for number in (0, 1):
        seen = [(rank["world_size"], rank["local_rank"]) for rank in witnesses(RUNS / str(number))]
        assert seen == [(2, 0), (2, 1)]
    assert [row[-2] for row in rows(done.stdout)] == ["finished", "finished", "failed"]
    told = "job 2      error: global_batch_size=0: use a number from 1"
    assert f"1 of 3 jobs failed\n{told}" in done.stdout
    assert done.stdout.endswith(f"\ncompare    python -m lightswitch.compare {RUNS}\n")
    assert len(list(Path("runs").glob("*/*"))) == 1


@pytest.mark.nightly
def test_an_interrupt_ends_the_sweep_and_leaves_no_process(swept: Path) -> None:
    command = ["python", str(swept), "-m", *SWEPT, "name=waiting", "seed=1,2,3", "sweep.jobs_at_once=2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while len(list(Path("runs/waiting/x").glob("*/waits"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    stopped = [["seed=1", "-", "stopped", "runs/waiting/x/0"], ["seed=2", "-", "stopped", "runs/waiting/x/1"]]
    assert [row[1:] for row in rows(out)] == [*stopped, ["seed=3", "-", "not", "begun"]]
    assert re.search(r"^go on      python \S+swept.py -m .*\brun_id=x\b", out, re.MULTILINE)
    assert children
    assert psutil.wait_procs(children, timeout=300)[1] == [], "they would wait for an hour"


@pytest.mark.nightly
def test_optuna_samples_once_for_all_ranks_and_goes_on_as_before(sweep: Sweep) -> None:
    chosen = ("hydra/sweeper=optuna", "hydra.sweeper.sampler.seed=1", "model.lr=interval(0.01,0.1)")
    done, more = (
        sweep(*FAST, *chosen, f"hydra.sweeper.n_trials={count}", script=CHECKOUT / "train.py") for count in (1, 2)
    )
    assert (done.returncode, more.returncode) == (0, 0), more.stderr
    assert rows(more.stdout)[0][-3:] == rows(done.stdout)[0][-3:]  # the value, the state and the directory
    assert more.stdout.count("has already finished") == 1
    ranks = [[rank["hparams"]["lr"] for rank in witnesses(RUNS / str(number))] for number in range(2)]
    assert ranks[0][0] == ranks[0][1] != ranks[1][0] == ranks[1][1]
    best = min(rows(more.stdout), key=lambda row: float(row[2]))
    assert str(ranks[int(best[0])][0]) in (RUNS / "optimization_results.yaml").read_text()


@pytest.mark.nightly
def test_a_job_is_handed_an_interpolation_and_not_the_secret_that_it_gives(sweep: Sweep) -> None:
    secret, model = "hunter2-correct-horse", "model._target_=tests.engine.config.secretive.SecretModel"
    own = (model, PLAIN_DATA, "+model.token=${oc.env:API_TOKEN}", "+model.how=nothing")
    rest = ("trainer.accelerator=cpu", "trainer.fast_dev_run=true", "run_id=x", "seed=1")
    done = sweep(*own, *rest, script=CHECKOUT / "train.py", API_TOKEN=secret)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = Path("runs").glob("*/x/0/job.json")
    overrides = json.loads(written.read_text())["overrides"]  # and so is the job's command line, which all can read
    assert [text.replace("\\", "") for text in overrides if "token" in text] == ["++model.token=${oc.env:API_TOKEN}"]
    files = [path for path in Path("runs").glob("**/*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert secret not in done.stdout + done.stderr


# A mistake that all jobs of a sweep have is told before the first; one that some of them have is theirs


TYPO = "trainer.max_stps: Trainer takes no max_stps. Did you mean max_steps?"
LACKING = "model.optimizer: LanguageModel needs it; give model.optimizer=VALUE"
LANGUAGE, PLAIN = " ".join((*LANGUAGE_MODEL, TEXT)), "model._target_=tests.engine.plain.PlainModel"
INCOMPLETE = f"{LANGUAGE_MODEL[0]} {TEXT}"


@pytest.mark.parametrize(
    ("typed", "told"),  # with nothing told, the mistakes are left to the jobs that have them
    [
        (f"{LANGUAGE} trainer.max_stps=4 optimizer.eps=x,1e-8", [TYPO]),
        (f"{LANGUAGE} optimizer.eps=x,1e-8,y", []),
        (f"{LANGUAGE} seed=1,2 model.lr=0.1", ["model.lr: LanguageModel takes no lr; type optimizer.lr=0.1"]),
        (f"{LANGUAGE} model.lr=0.1,0.2", ["model.lr: LanguageModel takes no lr; type optimizer.lr=0.1"]),
        # the first and the last take no such option
        (f"{LANGUAGE} strategy=fsdp,ddp,fsdp_hybrid trainer.strategy.find_unused_parameters=true", []),
        *at_night(
            (f"{LANGUAGE} +data.none=1 data._target_=tests.engine.data.text.Text,tests.engine.data.none", []),
            (f"{LANGUAGE} seed=range(1,4) model.layers=choice(2,3) trainer.max_stps=4", [TYPO]),
            (f"{INCOMPLETE} seed=1,2", [LACKING]),  # what all jobs sweep is not missing
            (f"{LANGUAGE} hydra.searchpath=[file://TMP] experiment=search trainer.max_stps=4", [TYPO]),
        ),
    ],
)
def test_what_all_jobs_have_is_told_and_what_some_have_is_left_to_them(
    typed: str, told: list[str], tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    search = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: choice(2, 3)\n"
    (tmp_path / "experiment/search.yaml").write_text(search)
    assert _shared(*typed.replace("TMP", str(tmp_path)).split()) == told


def _shared(*typed: str) -> list[str]:
    words = normalised([*typed, "hydra.mode=MULTIRUN"])
    register_resolvers(placement.detect())
    try:
        with initialize_config_dir(str(CHECKOUT / "conf"), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            cfg = loader.load_configuration("config", words, RunMode.MULTIRUN)
            return shared_problems(cfg, partial(loader.load_sweep_config, cfg))
    finally:
        HydraConfig.instance().cfg = None


def test_a_sweep_is_refused_in_a_line_before_any_job(tmp_path: Path) -> None:
    plain = f"-m {PLAIN} data._target_=tests.engine.plain.PlainData run_id=x"
    rank = "TORCHELASTIC_RUN_ID=x RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2"
    # of classes that are swept Hydra leaves the name out of the sweep's own config
    classes = "model._target_=tests.engine.plain.PlainModel,tests.engine.plain.SGDModel"
    expected = {
        f"{plain} seed=range(0,1000) trainer.max_stps=4": TYPO,
        f"{plain} {classes} trainer.max_stps=4": TYPO,
        f"{plain} seed=1,2 sweep.jobs_at_once=0": "sweep.jobs_at_once=0: use a number from 1",
        f"-m {classes} data._target_=tests.engine.plain.PlainData sweep.jobs_at_once=0": "sweep.jobs_at_once=0: use a "
        "number from 1",
        f"CUDA_VISIBLE_DEVICES= {plain} seed=1,2 sweep.devices_per_job=1": "sweep.devices_per_job=1: found 0 GPUs; on "
        "CPUs type sweep.jobs_at_once=2",
        f"{rank} MASTER_ADDR=localhost MASTER_PORT=29500 {plain} seed=1,2": "a sweep starts the processes of its jobs "
        "itself, but torchrun has started this process; type python train.py -m … trainer.devices=N without it",
    }
    found = answers({one: one.split() for one in expected}, tmp_path)
    assert {words: answer.err for words, answer in found.items()} == {
        words: f"error: {told}\n" for words, told in expected.items()
    }
    assert {answer.returncode for answer in found.values()} == {2}
    assert not [path for answer in found.values() for path in answer.left]
