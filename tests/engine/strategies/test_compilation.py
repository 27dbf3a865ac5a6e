"""torch.compile changes how a run computes, and nothing else: its curve, names and checkpoints stay."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightswitch
from lightswitch.hooked_strategy import hooked
from lightswitch.preflight import devices
from lightswitch.strategies.callbacks import StrategyCallback
from lightswitch.strategies.ddp import Single
from lightswitch.strategies.units import Compilation, CompiledForward
from tests.engine.conftest import PLAIN, Finished, Train, runs_in
from tests.engine.fits import LANGUAGE as LANGUAGE_FIT
from tests.engine.fits import Fits
from tests.engine.plain import PlainData, PlainModel
from tests.engine.tiny import LANGUAGE, NO_CHECKPOINTS
from tests.engine.ways import WAYS
from tests.night import at_night
from tests.pool import Pool
from tests.runs import largest_difference

STEPS = ("trainer.max_steps=4", "trainer.val_check_interval=4", *NO_CHECKPOINTS)
ON_GPU = (*STEPS, "trainer.accelerator=gpu")


AOT = partial(Compilation, backend="aot_eager")
WHOLE = partial(Compilation, scope="whole", backend="aot_eager")


@pytest.mark.filterwarnings("ignore")  # dynamo makes what FSDP and DeepSpeed have made for autograd alone
@pytest.mark.parametrize("strategy", ["fsdp", *at_night("deepspeed_stage_3")])  # tests/nightly has the others
def test_a_compiled_run_is_the_eager_one(strategy: str, fits: Fits) -> None:
    (eager,), run = fits(LANGUAGE_FIT), fits(replace(LANGUAGE_FIT, strategy=strategy, compilation=AOT), 2)[0]
    assert "compiles   2 Block by aot_eager" in run.told
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(run, eager, metric) <= 1e-5, metric


def test_units_that_zero_3_would_leave_empty_are_refused(train: Train) -> None:
    compiled = ("strategy=deepspeed_stage_3", "compile=true", "compile.backend=aot_eager", "trainer.accelerator=cpu")
    run = train(*PLAIN, *compiled, ranks=2, check=False)
    assert run.returncode == 2
    assert "error: compile=true: net.0 is a Linear, which has direct parameters" in run.err


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


@pytest.mark.gpu
@pytest.mark.parametrize(("scope", "micro_batch"), [("units", 6), ("whole", 24)])  # accumulated, and a step's only one
def test_cuda_graphs_keep_the_curve(scope: str, micro_batch: int, train: Train) -> None:
    run = (*LANGUAGE, *ON_GPU, "strategy=single", f"micro_batch_size={micro_batch}")
    graphs = ("compile=true", "compile.mode=reduce-overhead", f"compile.scope={scope}")
    assert largest_difference(train(*run, *graphs), train(*run)) <= 1e-4


@pytest.mark.gpu
def test_cuda_graphs_evaluate_in_a_start_of_their_own(train: Train) -> None:
    graphs = (*LANGUAGE, "strategy=single", "trainer.accelerator=gpu", "compile=true", "compile.mode=reduce-overhead")
    fitted = train(*graphs, "trainer.max_steps=4", "trainer.val_check_interval=4")
    checkpoint = f"ckpt_path={fitted.run_dir}/checkpoints/last.ckpt"
    evaluated, expected = train(*graphs, "mode=validate", checkpoint).column("val/loss"), fitted.column("val/loss")
    assert [*evaluated.values()] == pytest.approx([*expected.values()], abs=1e-4)


# The pieces


class Generations(pl.Callback):
    """Notes in which generation of CUDA graphs each batch is; one may overwrite what those before it have returned."""

    def __init__(self) -> None:
        from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

        self._generation = CUDAGraphTreeManager.get_curr_generation
        self.trained: list[int] = []
        self.evaluated: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.trained.append(self._generation())

    def on_validation_batch_start(self, *_: Any) -> None:
        self.evaluated.append(self._generation())


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's import
@pytest.mark.parametrize(
    ("every_n_batches", "validations"),
    [*at_night((2, 2)), (3, 0)],  # between steps; and within one, whose gradients are still needed
)
def test_cuda_graphs_keep_what_a_step_still_needs(every_n_batches: int, validations: int) -> None:
    noted = Generations()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=hooked(Single()),
        callbacks=[StrategyCallback(compilation=Compilation(backend="eager", mode="reduce-overhead")), noted],
        accumulate_grad_batches=2,
        max_steps=2,
        val_check_interval=every_n_batches,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with torch.compiler.set_stance("force_eager"):  # when a generation begins is all that matters
        trainer.fit(PlainModel(), PlainData())
    first, same, second, also_same = noted.trained
    assert first == same != second == also_same
    assert len({*noted.evaluated} - {*noted.trained}) == validations


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


@pytest.mark.nightly
def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compile.backend=inducter: torch has no such backend. Did you mean induc"):
        Compilation(backend="inducter")


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
DROPPING = ("model.dropout=0.1",)  # on one device: the ranks of a run draw other numbers than one process


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


@pytest.mark.nightly
def test_inductor_drops_the_same_units(train: Train) -> None:
    dropping = (*LANGUAGE, *SHORT, *DROPPING, "strategy=single")
    _is_the_run_of(train(*dropping), train(*dropping, "compile=true"))
