"""Weights taken out of real runs by `python -m lightswitch.export`, and given back by `lightswitch.load`."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import load_file

import lightswitch
from lightswitch.checkpoints import directory
from lightswitch.errors import UnfitCheckpoint
from lightswitch.export.__main__ import main
from lightswitch.launch import report
from tests.engine.checkpoints.damages import Damage, flip, truncate
from tests.engine.conftest import PLAIN_DATA, Train, runs_in
from tests.engine.export.models import Versioned, question
from tests.engine.foreign import Late
from tests.engine.models.language import LanguageModel
from tests.engine.tiny import LANGUAGE, PICTURES
from tests.engine.ways import WAYS, Way
from tests.night import at_night

STRATEGIES = {
    "single": Way(("strategy=single",)),
    **{name: Way((f"strategy={name}",), 2) for name in ("ddp", "fsdp", "deepspeed_stage_3")},
    "fsdp_tp": WAYS["fsdp_tp 2 × 2"],
}

SHORT = ("trainer.max_steps=4", "trainer.val_check_interval=2", "global_batch_size=24", "run_id=mine")
ANSWERS = (
    "callbacks.answer._target_=tests.engine.export.models.Answer",
    "callbacks.answer.folder=${hydra:runtime.output_dir}",
)
MODELS = {
    "language": (*LANGUAGE, "model.width=32"),
    "tied": ("model._target_=tests.engine.export.models.Tied", PLAIN_DATA),
    "versioned": ("model._target_=tests.engine.export.models.Versioned", PLAIN_DATA),
    "configured": ("model._target_=tests.engine.export.models.Configured", PLAIN_DATA),
}

RunOf = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """`run_of(model, strategy)`: the directory of a finished run, trained when it is first asked for."""
    runs: dict[tuple[str, str], Path] = {}

    def run_dir(model: str, strategy: str = "single") -> Path:
        if (model, strategy) not in runs:
            train, way = runs_in(tmp_path_factory.mktemp(f"{model}_{strategy}")), STRATEGIES[strategy]
            finished = train(*MODELS[model], *SHORT, *ANSWERS, *way.switches, ranks=way.ranks)
            runs[model, strategy] = finished.run_dir
        return runs[model, strategy]

    return run_dir


def export(*words: str | Path) -> None:
    main([str(word) for word in words])


@pytest.mark.parametrize(
    ("model", "strategy", "name"),
    [
        ("language", "single", "out.pt"),
        *at_night(
            *(("language", "single", name) for name in ("out.safetensors", "folder", "no export")),
            *(("language", "ddp", "out.safetensors"), ("language", "fsdp", "out.pt")),
            *(("language", "deepspeed_stage_3", "folder"), ("language", "fsdp_tp", "no export")),
            *(("tied", "fsdp", "no export"), ("configured", "fsdp", "no export")),
        ),
    ],
)
def test_of_every_strategy_the_loaded_model_answers_as_the_live_one(
    model: str, strategy: str, name: str, run_of: RunOf, tmp_path: Path
) -> None:
    run_dir = run_of(model, strategy)
    file = run_dir / "checkpoints" / "last.ckpt"
    if name != "no export":
        export(file, "-o", tmp_path / name)
        file = tmp_path / name
    before = torch.get_rng_state()
    loaded = lightswitch.load(file)
    assert torch.equal(torch.get_rng_state(), before), "it drew initial weights"
    logits, live = loaded(question(loaded)), torch.load(run_dir / "logits.pt")
    # a tensor-parallel group adds up in another order
    assert torch.allclose(logits, live, rtol=0, atol=1e-5 if strategy == "fsdp_tp" else 0)
    assert not loaded.training
    assert not logits.requires_grad


@pytest.mark.parametrize("name", ["tied.safetensors", *at_night("tied.pt", "a run")])
def test_tied_weights_stay_tied_inside_a_compiled_module(name: str, run_of: RunOf, tmp_path: Path) -> None:
    path = run_of("tied", "single")
    if name != "a run":
        export(path, "-o", tmp_path / name)
        path = tmp_path / name
    net = lightswitch.load(path).net._orig_mod
    assert net[2].there.weight is net[2].back.weight
    assert not net[2].there.weight.requires_grad


def test_names_are_the_users_own_and_weights_of_the_dtype_asked_for(run_of: RunOf, tmp_path: Path) -> None:
    run_dir = run_of("tied", "single")
    for dtype, suffix in ((torch.bfloat16, "safetensors"), (torch.float16, "safetensors"), (torch.bfloat16, "pt")):
        file = tmp_path / f"{dtype}.{suffix}"
        export(run_dir / "checkpoints" / "last.ckpt", "-o", file, "--dtype", str(dtype).removeprefix("torch."))
        found = load_file(file) if suffix == "safetensors" else torch.load(file)
        expected = lightswitch.load(run_dir / "checkpoints" / "last.ckpt").state_dict()
        assert found["net.2.calls"].dtype == torch.int64
        assert torch.equal(found["net.0.weight"], expected["net._orig_mod.0.weight"].to(dtype))
    names = "net.0.bias net.0.weight net.2.calls net.2.there.weight net.3.bias net.3.weight"  # what is tied, once
    assert sorted(load_file(tmp_path / "torch.float16.safetensors")) == names.split()
    model = lightswitch.load(file)
    assert model.net._orig_mod[2].angles.dtype == model.dtype == torch.bfloat16  # of a table that is not saved
    built = instantiate(OmegaConf.load(f"{file}.yaml"))
    built.net = built.net._orig_mod  # it loads strictly into a module that is not compiled
    built.load_state_dict(found)
    assert found["net.2.there.weight"].data_ptr() == found["net.2.back.weight"].data_ptr()


def test_lightning_loads_a_ckpt_file_as_its_own_and_a_run_that_has_ended_has_one_of_its_best_weights(
    run_of: RunOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments that the module has not saved are those of the config; an optimizer is no plain value."""
    run_dir, file = run_of("language", "single"), tmp_path / "language.ckpt"
    export(run_dir / "checkpoints" / "last.ckpt", "-o", file)
    assert f'LanguageModel.load_from_checkpoint("{file}")' in capsys.readouterr().out
    live = torch.load(run_dir / "logits.pt")
    for path, logits in ((file, live), (run_dir / "model.ckpt", None)):
        model = LanguageModel.load_from_checkpoint(path, optimizer=torch.optim.SGD).eval()
        loaded = lightswitch.load(file if logits is not None else run_dir)
        assert model.width == 32
        assert torch.equal(model(question(model)), loaded(question(loaded)))
        assert logits is None or torch.equal(model(question(model)), logits)
    assert not list(run_dir.glob("*.partial"))


def test_of_a_run_directory_the_best_is_taken_or_else_the_last(
    run_of: RunOf, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(run_of("language", "single"), run_dir)
    best, of_run = (lightswitch.load(path).state_dict() for path in (run_dir / "checkpoints/best.ckpt", run_dir))
    assert all(torch.equal(value, of_run[name]) for name, value in best.items())
    export(run_dir, "-o", tmp_path / "best.pt")
    directory.remove(run_dir / "checkpoints" / "best.ckpt")
    export(run_dir, "-o", tmp_path / "last.pt")
    reads = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("reads")]
    assert reads == [str(run_dir / "checkpoints" / name) for name in ("best.ckpt", "last.ckpt")]
    monkeypatch.setattr(report, "_LARGEST_COPIED_BYTES", 1000)  # larger weights are copied by the command alone
    command = f"python -m lightswitch.export {run_dir} -o {run_dir / 'model.ckpt'}"
    assert report._weights(run_dir) == {"export": command}


def test_another_model_in_the_config_and_a_truncated_file_are_told(run_of: RunOf, tmp_path: Path) -> None:
    shutil.copytree(run_of("language", "single"), tmp_path, dirs_exist_ok=True)
    for name in ("out.safetensors", "out.pt"):
        export(tmp_path, "-o", tmp_path / name)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1000])
        with pytest.raises(UnfitCheckpoint, match=f"{name} can't be read"):
            lightswitch.load(tmp_path / name)
    config = (tmp_path / "config.yaml").read_text()
    for found, other, told in (
        ("  width: 32\n", "  width: 64\n", "from a different model than its config builds: size mismatch for tokens"),
        ("language.LanguageModel", "language.LanguageModle", "LanguageModle can't be built from its config: .*Modle"),
    ):
        (tmp_path / "config.yaml").write_text(config.replace(found, other))
        with pytest.raises(UnfitCheckpoint, match=told):
            lightswitch.load(tmp_path)


def spoiled_by(harm: Damage) -> Callable[[Path], None]:
    return lambda run_dir: harm(Random(3), run_dir / "checkpoints/last.ckpt/tensors_0.bin")


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda run_dir: (run_dir / name).write_text(text)


LAST = "checkpoints/last.ckpt -o out.safetensors"
NO_CHECKPOINT = "can't be read as a checkpoint"


@pytest.mark.parametrize(
    ("spoil", "words", "told"),
    [
        (spoiled_by(truncate), LAST, f"last.ckpt {NO_CHECKPOINT}: tensors_0.bin is shorter than index.json says"),
        (spoiled_by(flip), LAST, f"last.ckpt {NO_CHECKPOINT}: tensors_0.bin differs from its checksum"),
        (lambda run: (run / "config.yaml").unlink(), LAST, "last.ckpt has no config.yaml next to it, which defines"),
        (written("config.yaml", "model: ["), LAST, "config.yaml can't be read as a config"),
        (written("config.yaml", "seed: 1\n"), LAST, "config.yaml names no model: it has no model._target_"),
        (written("out.safetensors", "mine"), LAST, "out.safetensors exists already; remove it, or name another file"),
        (Path.exists, "nowhere -o out.pt", "nowhere: there is no such file or directory"),
        (Path.exists, "metrics.csv -o out.pt", f"metrics.csv {NO_CHECKPOINT}"),
        (Path.exists, "checkpoints -o out.pt", f"checkpoints {NO_CHECKPOINT}: it has no SHA256SUMS"),
        (Path.exists, f"{LAST} --dtype int8", "argument --dtype: invalid choice: 'int8'"),
        (Path.exists, ". -o out.bin", "argument -o/--output: out.bin: end it with .safetensors, .pt or .ckpt"),
        (Path.exists, ". -o metrics.csv/out.pt", "Not a directory"),
    ],
)
def test_a_mistake_is_told_in_a_line_and_nothing_is_written(
    spoil: Callable[[Path], object],
    words: str,
    told: str,
    run_of: RunOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(run_of("language", "single"), tmp_path, dirs_exist_ok=True)
    spoil(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        export(*words.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("error: ")
    assert told in line
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.fixture
def small_files() -> Iterator[None]:
    """A limit to the size of files, for a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["language.safetensors", "language.pt"])
def test_a_full_disk_leaves_nothing_behind(
    name: str, run_of: RunOf, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    run_dir = run_of("language", "single")
    request.getfixturevalue("small_files")
    with pytest.raises(SystemExit):
        export(run_dir, "-o", tmp_path / name)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {name} can't be written: ")
    assert "File too large" in line
    assert not any(tmp_path.iterdir())


def run_with(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    state = {f"model.{name}": value for name, value in tensors.items()}
    directory.write(folder / "checkpoints" / "last.ckpt", state, {}, None)
    (folder / "config.yaml").write_text("model:\n  _target_: tests.engine.plain.PlainModel\n")
    return folder


def test_a_value_beyond_the_range_of_float16_is_refused_and_an_infinity_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_with(tmp_path / "large", {"a": torch.tensor([1.0]), "b": torch.tensor([1e6])})
    with pytest.raises(SystemExit):
        export(run_dir, "-o", tmp_path / "large.safetensors", "--dtype", "float16")
    assert "error: b has values beyond the range of float16" in capsys.readouterr().err
    run_dir = run_with(tmp_path / "infinite", {"a": torch.tensor([float("inf"), float("nan"), -0.0])})
    export(run_dir, "-o", tmp_path / "infinite.safetensors", "--dtype", "float16")
    assert load_file(tmp_path / "infinite.safetensors")["a"].tolist()[0] == float("inf")


# By night


@pytest.mark.nightly
def test_a_sharded_model_lists_the_names_of_its_tied_tensors(train: Train, tmp_path: Path) -> None:
    """Under DeepSpeed: test_zero.py."""
    short = ("trainer.max_steps=1", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
    late = ("model._target_=tests.engine.foreign.Late", PICTURES, "trainer.accelerator=cpu", "global_batch_size=16")
    run = train(*late, *short, "strategy=fsdp", ranks=2)
    export(run.run_dir, "-o", tmp_path / "late.pt")
    state = torch.load(tmp_path / "late.pt")
    assert state["tied_again.weight"].data_ptr() == state["tied.weight"].data_ptr()
    model = Late()
    model.configure_model()
    model.load_state_dict(state)


@pytest.mark.nightly
def test_what_is_no_tensor_is_kept_and_safetensors_of_it_are_refused(
    run_of: RunOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_of("versioned", "single")
    for name in ("versioned.pt", "versioned.ckpt"):
        export(run_dir, "-o", tmp_path / name)
        assert lightswitch.load(tmp_path / name).version == lightswitch.load(run_dir).version == 2
    assert Versioned.load_from_checkpoint(tmp_path / "versioned.ckpt").version == 2
    with pytest.raises(SystemExit):
        export(run_dir, "-o", tmp_path / "versioned.safetensors")
    told = "error: _extra_state is not a dense tensor, and safetensors can store only those; use -o"
    assert told in capsys.readouterr().err


@pytest.mark.nightly
def test_a_checkpoint_of_a_stock_trainer_in_a_run_directory_is_exported(run_of: RunOf, tmp_path: Path) -> None:
    run_dir = run_of("tied", "single")
    expected = lightswitch.load(run_dir / "checkpoints" / "last.ckpt").state_dict()
    shutil.copy(run_dir / "config.yaml", tmp_path)
    torch.save({"state_dict": expected, "global_step": 4}, tmp_path / "stock.ckpt")
    export(tmp_path / "stock.ckpt", "-o", tmp_path / "tied.safetensors")
    export(run_dir / "checkpoints" / "last.ckpt", "-o", tmp_path / "own.safetensors")
    stock, own = (lightswitch.load(tmp_path / name).state_dict() for name in ("tied.safetensors", "own.safetensors"))
    assert all(torch.equal(stock[name], own[name]) for name in expected)
    # a checkpoint of Lightning does not tell which names are one weight's
    assert load_file(tmp_path / "tied.safetensors").keys() > load_file(tmp_path / "own.safetensors").keys()


def test_a_folder_that_the_hub_does_not_take_stays_and_the_line_says_what_uploads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "-o", str(tmp_path / "model"), "--push-to-hub", "me/model"])
    assert "--push-to-hub me/model uploads a folder; add --format hf or peft" in capsys.readouterr().err
    script = "import pathlib, sys; from lightswitch.export import __main__ as export; "
    script += "export._push(pathlib.Path(sys.argv[1]), 'me/model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    refused = subprocess.run([sys.executable, "-c", script, "folder"], env=environment, capture_output=True, text=True)
    assert "--push-to-hub me/model: " in refused.stderr
    assert "; type hf auth login, then hf upload me/model folder" in refused.stderr
