from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.conftest import PLAIN, Finished, Train, runs_in
from tests.plain import PlainModel
from tests.tiny import GPT, MODELS, NO_CHECKPOINTS

FSDP1 = ("strategy=fsdp1", "trainer.accelerator=cpu", *NO_CHECKPOINTS)
SHARDINGS = {
    "FULL_SHARD": 2,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 2,
    "HYBRID_SHARD trainer.strategy.device_mesh=[2,2]": 4,
    "_HYBRID_SHARD_ZERO2 trainer.strategy.device_mesh=[2,2]": 4,
}
OPTIONS = {
    "activation_checkpointing=true": 2,
    "auto_wrap_policy=[Attention,MLP]": 2,
    "cpu_offload=true": 2,
    "sharding_strategy=HYBRID_SHARD": 2,
    "mixed_precision={reduce_dtype:float32}": 2,
    "sharding_strategy=FULL_SHARD": 1,
}


class Witness(pl.Callback):
    """Writes the whole weights at the start, and the elements that this rank holds at the end."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(trainer.model):
                self._save(trainer, pl_module)
        else:
            self._save(trainer, pl_module)

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weights = {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in pl_module.named_parameters()
        }
        torch.save(weights, self.folder / f"initial_{trainer.global_rank}.pt")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        states = trainer.optimizers[0].state.values()
        held = {
            "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
            "moments": sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in states),
        }
        (self.folder / f"held_{trainer.global_rank}.json").write_text(json.dumps(held))


WITNESS = (
    "callbacks.witness._target_=tests.strategies.test_fsdp1.Witness",
    "callbacks.witness.folder=${hydra:runtime.output_dir}",
)


class Late(PlainModel):
    """Builds its layers in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


class ByHand(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Adagrad(PlainModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters())


@pytest.fixture(scope="module", params=MODELS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Finished]:
    train = runs_in(tmp_path_factory.mktemp(request.param))
    run = train(*MODELS[request.param], *WITNESS, *NO_CHECKPOINTS, "strategy=single", "trainer.accelerator=cpu")
    return request.param, run


@pytest.fixture(scope="module")
def gpt_alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("gpt"))(*SHORT_GPT, *WITNESS, *NO_CHECKPOINTS, "strategy=single")


SHORT_GPT = (*GPT, "trainer.max_steps=10", "trainer.val_check_interval=10")


def assert_same_curves(found: Finished, expected: Finished, metrics: tuple[str, ...] = ("train/loss",)) -> None:
    for metric in metrics:
        here, there = found.column(metric), expected.column(metric)
        assert here.keys() == there.keys()
        assert max(abs(here[step] - there[step]) for step in there) <= 1e-5, metric


def initial(run: Finished) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path) for path in sorted(run.run_dir.glob("initial_*.pt"))]


def held(run: Finished, what: str) -> list[int]:
    return [json.loads(path.read_text())[what] for path in sorted(run.run_dir.glob("held_*.json"))]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_sharding_keeps_the_losses_and_the_initial_weights(
    sharding: str, alone: tuple[str, Finished], train: Train
) -> None:
    model, reference = alone
    typed, ranks = f"trainer.strategy.sharding_strategy={sharding}".split(), SHARDINGS[sharding]
    run = train(*MODELS[model], *WITNESS, *FSDP1, *typed, ranks=ranks)

    assert len(run.column("train/loss")) == 50
    assert_same_curves(run, reference, ("train/loss", "val/loss", "test/loss"))
    (expected,) = initial(reference)
    for found in initial(run):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    devices = 1 if sharding == "NO_SHARD" else 2
    for what in ("parameters", "moments"):
        (whole,) = held(reference, what)
        assert all(count == pytest.approx(whole / devices, rel=0.01) for count in held(run, what))
    assert "FSDP" not in run.err
    assert "Warning" not in run.err
    assert run.out.count("fsdp1 is torch's older FSDP, which it is giving up; strategy=fsdp is its successor") == 1


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_keeps_the_losses(option: str, gpt_alone: Finished, train: Train) -> None:
    run = train(*SHORT_GPT, *FSDP1, f"trainer.strategy.{option}", ranks=OPTIONS[option])
    assert_same_curves(run, gpt_alone)


def test_clipping_by_value_and_bf16_are_those_of_one_process(train: Train) -> None:
    switches = (*SHORT_GPT, "+trainer.gradient_clip_algorithm=value", "trainer.gradient_clip_val=0.01")
    switches += ("precision=bf16-mixed",)
    alone, run = train(*switches, *NO_CHECKPOINTS, "strategy=single"), train(*switches, *FSDP1, ranks=2)
    here, there = run.column("train/loss"), alone.column("train/loss")
    assert max(abs(here[step] - there[step]) for step in there) < 2e-3


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_model_built_in_configure_model_starts_as_in_one_process(ranks: int, train: Train) -> None:
    late = (*PLAIN, "model._target_=tests.strategies.test_fsdp1.Late", *WITNESS, "global_batch_size=24")
    late += ("trainer.max_steps=5", "trainer.log_every_n_steps=1")
    alone, run = train(*late, *NO_CHECKPOINTS, "strategy=single"), train(*late, *FSDP1, ranks=ranks)
    (expected,) = initial(alone)
    assert len(initial(run)) == ranks
    for found in initial(run):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_same_curves(run, alone)


@pytest.mark.parametrize("model", ["Convolutions", "Encoder"])
def test_a_module_written_for_no_strategy_trains_as_under_ddp(model: str, train: Train) -> None:
    foreign = (f"model._target_=tests.foreign.{model}", "data._target_=tests.foreign.Pictures")
    foreign += ("global_batch_size=16", "trainer.max_steps=20", "trainer.val_check_interval=10")
    foreign += ("trainer.log_every_n_steps=1",)
    ddp = train(*foreign, *NO_CHECKPOINTS, "strategy=ddp", ranks=2)
    run = train(*foreign, *FSDP1, ranks=2)
    assert_same_curves(run, ddp, ("train/loss", "val/loss", "val/accuracy", "test/loss"))
    assert run.column("val/accuracy")[19] > 0.6


MODELS_REFUSED = {
    "ByHand": "ByHand optimizes by hand inside of training_step, where a sharded strategy has the parameters gathered; "
    "use strategy=ddp",
    "Adagrad": "Adagrad makes its state before the first step, where it would not be sharded; use strategy=fsdp, "
    "or another optimizer",
}


@pytest.mark.parametrize("model", MODELS_REFUSED)
def test_a_module_that_it_cannot_shard_is_refused_in_a_line(model: str, train: Train) -> None:
    by_hand = "trainer.gradient_clip_val=null"  # Lightning clips no gradients of those who optimize by hand
    run = train(*PLAIN, f"model._target_=tests.strategies.test_fsdp1.{model}", *FSDP1, by_hand, ranks=2, check=False)
    assert run.returncode == 2
    assert set(run.err.splitlines()) == {f"error: {MODELS_REFUSED[model]}"}


REFUSED = {
    "trainer.strategy.device_mesh=[1,2]": "trainer.strategy.device_mesh is for HYBRID_SHARD, and "
    "sharding_strategy=FULL_SHARD; leave it out",
    "trainer.strategy.sharding_strategy=HYBRID_SHARD trainer.strategy.device_mesh=[2,2]": "trainer.strategy.device_mesh"
    "=[2, 2]: [replicas, devices of each] has to make the 2 devices of the run",
    "trainer.strategy.sharding_strategy=HYBRID_SHARD trainer.strategy.device_mesh=[2,1]": "sharding_strategy="
    "HYBRID_SHARD with 2 replicas of 1 device each shards nothing; use strategy=ddp, or give "
    "trainer.strategy.device_mesh=[replicas,devices of each]",
    "trainer.strategy.sharding_strategy=FULL": "trainer.strategy.sharding_strategy=FULL: found str, expected "
    "FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, _HYBRID_SHARD_ZERO2. Did you mean FULL_SHARD?",
    "trainer.strategy.mixed_precision={param:float32}": "trainer.strategy.mixed_precision.param: use param_dtype, "
    "reduce_dtype or buffer_dtype",
    "trainer.strategy.mixed_precision={param_dtype:fp8}": "trainer.strategy.mixed_precision.param_dtype=fp8: "
    "use float32, bfloat16 or float16",
    "precision=64-true": "precision=64-true is not for strategy=fsdp1, which clips gradients in 32 bits; "
    "use strategy=fsdp or ddp",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_it_cannot_do_is_told_in_a_line(options: str, train: Train) -> None:
    run = train(*PLAIN, *FSDP1, "trainer.devices=2", *options.split(), check=False)
    assert (run.returncode, run.err) == (2, f"error: {REFUSED[options]}\n")
