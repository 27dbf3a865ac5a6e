"""torch.compile changes how a run computes, and nothing else: its curve, names and checkpoints stay."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lightswitch
from lightswitch.preflight import devices
from lightswitch.strategies.units import Compilation, CompiledForward
from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.fits import LANGUAGE as LANGUAGE_FIT
from tests.engine.fits import Fits
from tests.engine.tiny import LANGUAGE, NO_CHECKPOINTS
from tests.engine.ways import WAYS
from tests.night import at_night
from tests.pool import Pool
from tests.runs import largest_difference

STEPS = ("trainer.max_steps=4", "trainer.val_check_interval=4", *NO_CHECKPOINTS)
ON_GPU = (*STEPS, "trainer.accelerator=gpu")


AOT = partial(Compilation, backend="aot_eager")
WHOLE = partial(Compilation, units=[], backend="aot_eager")


@pytest.mark.filterwarnings("ignore")  # dynamo makes what FSDP and DeepSpeed have made for autograd alone
@pytest.mark.parametrize("strategy", ["fsdp", *at_night("deepspeed_stage_3")])  # tests/nightly has the others
def test_a_compiled_run_is_the_eager_one(strategy: str, fits: Fits) -> None:
    (eager,), run = fits(LANGUAGE_FIT), fits(replace(LANGUAGE_FIT, strategy=strategy, compilation=AOT), 2)[0]
    assert "compiles   2 Block by aot_eager" in run.told
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(run, eager, metric) <= 1e-5, metric


@pytest.mark.nightly
def test_the_training_step_is_compiled_as_a_whole(fits: Fits) -> None:
    (eager,), (run,) = fits(LANGUAGE_FIT), fits(replace(LANGUAGE_FIT, compilation=WHOLE))
    assert "compiles   the training step by aot_eager" in run.told
    assert largest_difference(run, eager) <= 1e-5


@pytest.mark.nightly
def test_a_resume_may_switch_it_and_weights_keep_their_names(train: Train) -> None:
    switches = (*LANGUAGE, "strategy=single", "scheduler=constant", "run_id=mine", "trainer.val_check_interval=4")
    alone = train(*switches, "trainer.max_steps=8")
    begun = train(*switches, "trainer.max_steps=4", "compile=true", "compile.backend=aot_eager")
    resumed = train(*switches, "trainer.max_steps=8", folder=begun.folder)
    assert "resumes" in resumed.out
    assert "compile" not in next(line for line in resumed.out.splitlines() if line.startswith("resumes"))
    assert resumed.column("train/loss")[7] == pytest.approx(alone.column("train/loss")[7], abs=1e-5)
    names, expected = (set(lightswitch.load(run.run_dir).state_dict()) for run in (begun, alone))
    assert names == expected


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_3"])
def test_inductor_keeps_the_curve_on_a_gpu(strategy: str, train: Train) -> None:
    run = (*LANGUAGE, *ON_GPU, f"strategy={strategy}")
    assert largest_difference(train(*run, "compile=true"), train(*run)) <= 1e-4


# The pieces


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


def test_a_copy_of_a_compiled_module_has_its_own_forward_pass() -> None:
    module = Doubling()
    module.forward = CompiledForward(module, {"backend": "eager"})
    copied = copy.deepcopy(module)
    copied.factor.data.fill_(3.0)
    one = torch.ones(())
    assert (module(one).item(), copied(one).item()) == (2.0, 3.0)


def test_a_missing_compiler_is_named_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = {"_target_": "lightswitch.strategies.units.Compilation"}
    (problem,) = devices.compiler_problems(config, "cpu")
    assert problem.startswith("compile=true needs a compiler, and there is no no-such-compiler here; type apt-get")
    assert not list(devices.compiler_problems({**config, "backend": "aot_eager"}, "cpu"))
    assert not list(devices.compiler_problems({}, "cpu"))


def graphs(strategy: str) -> int:
    """Return how many graphs are compiled of a fit, of whose units each is one."""
    made: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    name = f"counting_{strategy}"
    torch._dynamo.register_backend(counting, name=name)
    fit = replace(LANGUAGE_FIT, strategy=strategy, steps=1, compilation=partial(Compilation, backend=name))
    fit.trainer().fit(fit.module(), fit.data())
    return len(made)


@pytest.mark.filterwarnings("ignore")  # dynamo looks at gradients of what is no leaf
def test_units_are_not_cut_by_the_buckets_of_ddp(pool: Pool) -> None:
    assert pool(1)(graphs, "ddp bucket_cap_mb=0.001") == pool(1)(graphs, "single")


# torch.compile under every strategy, and by inductor, which is a compiler of C++


SHORT = ("trainer.max_steps=4", "trainer.val_check_interval=4", *NO_CHECKPOINTS, "trainer.accelerator=cpu")
ONE_OF_EACH = [way for way in WAYS if not way.endswith(("× 1", "× 4"))]  # strategy; single has no number


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("eager"))(*LANGUAGE, *SHORT, "strategy=single")


def _is_the_run_of(eager: Finished, compiled: Finished) -> None:
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(compiled, eager, metric) <= 1e-5, metric


@pytest.mark.nightly
@pytest.mark.parametrize("way", ONE_OF_EACH)
def test_a_compiled_run_is_the_eager_one_under_every_strategy(way: str, eager: Finished, train: Train) -> None:
    compiled = ("compile=true", "compile.backend=aot_eager")
    run = train(*LANGUAGE, *SHORT, *WAYS[way].switches, *compiled, ranks=WAYS[way].ranks)
    assert "compiles   2 Block by aot_eager" in run.out
    _is_the_run_of(eager, run)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["fsdp × 2", "deepspeed_stage_3 × 2"])
def test_inductor_keeps_the_curve_of_shards(way: str, eager: Finished, train: Train) -> None:
    run = train(*LANGUAGE, *SHORT, *WAYS[way].switches, "compile=true", ranks=WAYS[way].ranks)
    _is_the_run_of(eager, run)
