"""Sharded training is the run of one process, in a part of its memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightswitch.failures.classify import Rank, failure_of
from lightswitch.preflight.strategies import Request, problems
from lightswitch.strategies.fsdp import FSDP
from tests.engine.fits import ADAMW, CLASSIFIER, LANGUAGE, PLAIN, TENSOR_PARALLEL, Fit, Fits
from tests.engine.foreign import Classifier, Encoder, Lazy, NothingToShard, OwnSharding
from tests.engine.models.language import LanguageModel
from tests.engine.models.pictures import Pictures
from tests.engine.plain import AveragedModel, PlainModel, UsedByRank0, UsedUnevenly
from tests.engine.strategies.witness import to_the_bit
from tests.night import at_night
from tests.pool import Pool, RankFailed
from tests.runs import largest_difference

SWITCHES = {  # ranks, and the part of the model that each rank holds
    "fsdp × 1": (1, 1.0),
    "fsdp × 2": (2, 0.5),
    "fsdp_grad_op": (2, 0.5),
    "fsdp sharding_strategy=NO_SHARD": (2, 1.0),
    "fsdp_hybrid shard_size=2": (4, 0.5),
    "fsdp activation_checkpointing=true": (4, 0.25),
}
MODELS = {"language": LANGUAGE, "classifier": CLASSIFIER}
OVER = (
    "fsdp × 1",
    "fsdp × 2",
    "fsdp_hybrid shard_size=2",
    "fsdp_grad_op",
)  # in tours
CASES = [*(("language", switch) for switch in SWITCHES if switch not in OVER)]
CASES += at_night(("classifier", "fsdp × 2"), *(("language", switch) for switch in OVER))


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "switch"), CASES)
def test_it_is_the_run_of_one_process(model: str, switch: str, fits: Fits) -> None:
    (alone,), (ranks, part) = fits(MODELS[model]), SWITCHES[switch]
    sharded = fits(replace(MODELS[model], strategy=switch.partition(" ×")[0]), ranks)
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(sharded[0], alone, metric) <= 1e-5, metric
    assert largest_difference(sharded[0], alone, "grad_norm") <= 1e-4
    for rank in sharded:
        assert to_the_bit(rank.start) == to_the_bit(alone.start)
        assert rank.held["parameters"] == pytest.approx(rank.held["whole"] * part, rel=0.01)
        assert rank.held["optimizer"] == pytest.approx(2 * rank.held["trained"] * part, rel=0.01)


@pytest.mark.nightly
def test_two_by_two_devices_of_tensor_parallelism_run_as_one(fits: Fits) -> None:
    (alone,) = fits(LANGUAGE)
    cut = fits(replace(LANGUAGE, strategy=TENSOR_PARALLEL), 4)
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(cut[0], alone, metric) <= 1e-5, metric
    assert largest_difference(cut[0], alone, "grad_norm") <= 1e-4
    matrices = sum(v.numel() for name, v in alone.start.items() if ".attention." in name or ".mlp." in name)
    others = sum(v.numel() for v in alone.start.values()) - matrices  # embeddings and norms are not cut, but sharded
    for rank in cut:
        assert to_the_bit(rank.start) == to_the_bit(alone.start)
        assert rank.held["parameters"] == matrices / 4 + others / 2
        assert rank.held["optimizer"] == 2 * (matrices / 4 + others / 2)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # the logits, unchanged
def test_the_devices_of_a_tensor_parallel_group_drop_the_same_units(fits: Fits) -> None:
    dropping = replace(LANGUAGE, module=partial(LanguageModel, ADAMW, dropout=0.3, tied=False, bias=True))
    first, second = fits(replace(dropping, strategy=TENSOR_PARALLEL, arguments="precision=bf16-mixed"), 2)
    assert to_the_bit(first.end) == to_the_bit(second.end)
    assert max(first.column("train/loss").values()) < 6


CLIPPED = Fit(Encoder, Pictures, arguments="gradient_clip_algorithm=value gradient_clip_val=0.01")


@pytest.mark.nightly
def test_gradients_are_clipped_by_value(fits: Fits) -> None:
    alone, sharded = fits(CLIPPED)[0], fits(replace(CLIPPED, strategy="fsdp"), 2)[0]
    assert largest_difference(sharded, alone) <= 1e-5


ROUNDED = {
    "fsdp, precision=bf16-mixed": torch.float32,
    "fsdp reduce_dtype=float32, precision=bf16-true": torch.bfloat16,
    "fsdp param_dtype=bfloat16 reduce_dtype=float32, ": torch.float32,
}


@pytest.mark.parametrize("rounded", [list(ROUNDED)[-1], *at_night(*list(ROUNDED)[:-1])])
def test_every_precision_trains(rounded: str, fits: Fits) -> None:
    strategy, _, arguments = rounded.partition(",")
    (exact,), run = fits(LANGUAGE), fits(replace(LANGUAGE, strategy=strategy, arguments=arguments), 2)[0]
    assert run.column("train/loss") == pytest.approx(exact.column("train/loss"), abs=0.03)
    assert {tensor.dtype for tensor in run.end.values()} == {ROUNDED[rounded]}


class Gathering(LanguageModel):
    """Logs the bytes of what its forward passes compute with: of a linear layer, a norm, and what is in no unit."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: dict[str, int] = {}
        block = self.transformer.blocks[0]
        hooks = [
            module.register_forward_pre_hook(lambda one, _, name=name: found.update({name: one.weight.itemsize}))
            for name, module in {"linear": block.mlp.input, "norm": block.mlp_norm, "tokens": self.tokens}.items()
        ]
        loss = super().training_step(batch, batch_idx)
        for hook in hooks:
            hook.remove()
        self.log_dict({f"bytes/{name}": float(bytes) for name, bytes in found.items()})
        return loss


class NotesHooks(LanguageModel):
    """Logs how many hooks of the engine a compiled module would trace: a dictionary there may change meanwhile."""

    def on_fit_start(self) -> None:
        hooks = [hook for module in self.modules() for hook in module._forward_pre_hooks.values()]
        own = [hook for hook in hooks if str(hook.__module__).startswith("lightswitch")]
        self.traced = (len(own), sum(not getattr(hook, "_torchdynamo_disable", False) for hook in own))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log_dict({"hooks": float(self.traced[0] > 0), "traced": float(self.traced[1])})
        return super().training_step(batch, batch_idx)


def test_no_hook_is_traced_by_a_module_that_is_compiled(fits: Fits) -> None:
    run = fits(replace(LANGUAGE, module=partial(NotesHooks, ADAMW), strategy="fsdp"), 2)[0]
    assert set(run.column("hooks").values()) == {1.0}
    assert set(run.column("traced").values()) == {0.0}


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), *at_night((TENSOR_PARALLEL, 4))])
def test_bf16_mixed_gathers_in_16_bits_what_autocast_rounds_and_changes_no_bit(
    strategy: str, ranks: int, fits: Fits
) -> None:
    strategy = strategy.replace("LanguageModel", "Gathering")
    mixed = replace(LANGUAGE, module=partial(Gathering, ADAMW), steps=8, arguments="precision=bf16-mixed")
    found = fits(replace(mixed, strategy=strategy), ranks)[0]
    whole = fits(replace(mixed, strategy=f"{strategy} param_dtype=float32"), ranks)[0]
    sizes = [{name: run.column(f"bytes/{name}")[0] for name in ("linear", "norm", "tokens")} for run in (found, whole)]
    assert sizes == [{"linear": 2, "norm": 4, "tokens": 4}, {"linear": 4, "norm": 4, "tokens": 4}]
    assert largest_difference(found, whole) == 0
    assert {tensor.dtype for tensor in found.end.values()} == {torch.float32}


def test_what_would_be_rounded_though_autocast_leaves_it_stays_whole(fits: Fits) -> None:
    mixed = replace(CLIPPED, module=WithBatchNorm, arguments="precision=bf16-mixed")
    found, expected = fits(replace(mixed, strategy="fsdp"), 2)[0], fits(replace(mixed, strategy="ddp"), 2)[0]
    assert largest_difference(found, expected) <= 1e-3


class WithBatchNorm(Classifier):
    """Of blocks that hold a batch norm, which takes no weights in 16 bits beside means in 32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def test_a_back_end_that_sums_for_an_average_is_asked_for_sums() -> None:
    at = {"nccl": False, "gloo": True}
    for backend, only_sums in at.items():
        assert FSDP(process_group_backend=backend).only_sums == only_sums
    assert not FSDP(process_group_backend="nccl", cpu_offload=True).only_sums


@pytest.mark.nightly
def test_dimensions_of_one_device_are_left_out_of_the_mesh(pool: Pool) -> None:
    """Each is a process group, which torch 2.8 can't make of two back ends, as offloading needs them."""
    for sharding, names in {"FULL_SHARD": ("shard",), "NO_SHARD": ("replicate", "shard")}.items():
        assert pool(2)(mesh_of, sharding) == [names] * 2


def mesh_of(sharding: str) -> tuple[str, ...] | None:
    fit = replace(LANGUAGE, strategy=f"fsdp_offload sharding_strategy={sharding}", steps=1)
    trainer = fit.trainer()
    trainer.fit(fit.module(), fit.data())
    return trainer.strategy.device_mesh.mesh_dim_names


def test_units_can_be_named_and_offloading_on_the_cpu_is_told(fits: Fits) -> None:
    named = "fsdp_offload units=[Attention,transformer.blocks.*.mlp]"
    sharded = fits(replace(LANGUAGE, strategy=named, steps=1), 2)[0]
    assert "units      2 Attention, 2 MLP over shard 2" in sharded.told
    assert "cpu_offload does nothing on the CPU" in sharded.told


HYBRID = {"sharding_strategy": "HYBRID_SHARD"}


def _request(ranks: int = 4, precision: str = "32-true", **strategy: object) -> Request:
    trainer = {"precision": precision}
    return Request({"_target_": "FSDP", **strategy}, {}, trainer, nodes=2, devices=ranks // 2, accelerator="cuda")


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (_request(shard_size=2), "trainer.strategy.shard_size is an option of HYBRID_SHARD; use strategy=fsdp_hybrid"),
        (_request(**HYBRID, shard_size=3), "shard_size=3 does not divide 4 devices; use one of 1, 2, 4"),
        (_request(param_dtype="bfloat16", precision="bf16-mixed"), "both set the dtype to compute in"),
        (_request(param_dtype="float32", precision="bf16-true"), "both set the dtype to compute in"),
    ],
    ids=["shard_size", "uneven", "two precisions", "also two"],
)
def test_what_it_can_not_do_is_told_before_a_process_is_started(request_: Request, line: str) -> None:
    (problem,) = problems(request_)
    assert line in problem


def test_what_it_can_do_is_not_refused() -> None:
    for precision in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"):
        assert not list(problems(_request(**HYBRID, precision=precision)))
    for precision in ("bf16-mixed", "16-mixed"):
        assert not list(problems(_request(param_dtype="float32", precision=precision)))


AVERAGED = replace(PLAIN, module=AveragedModel, micro_batch=None, steps=3)


class AveragedInStep(AveragedModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.on_train_batch_end()
        return super().training_step(batch, batch_idx)


def test_an_average_within_a_step_is_told_where_to_make_it(fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(AVERAGED, module=AveragedInStep, strategy="fsdp units=[Linear]"), 2)
    told = failure_of(Rank(0, 2, "here", 1), failed.value.error).line
    assert told.endswith("; compute with it in a hook such as on_train_batch_end, or use strategy=ddp")


class LooksFirst(LanguageModel):
    """Steps by hand, after a pass in which all is frozen, as GANs toggle their optimizers; not validated before."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, tied=False)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.requires_grad_(False)
        before = super().training_step(batch, batch_idx)
        self.requires_grad_(True)
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log_dict({"train/before": before, "train/after": loss})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluation_loss.update(super().training_step(batch, batch_idx))

    test_step = validation_step


def test_what_is_frozen_in_the_first_pass_of_a_step_trains_in_the_next_in_a_mixed_precision(fits: Fits) -> None:
    arguments = "precision=bf16-mixed num_sanity_val_steps=0 gradient_clip_val=null"
    mixed = replace(LANGUAGE, module=partial(LooksFirst, ADAMW), micro_batch=None, arguments=arguments)
    (alone,), (sharded, _) = fits(mixed), fits(replace(mixed, strategy="fsdp"), 2)
    for name in ("train/before", "train/after", "val/loss"):
        assert largest_difference(sharded, alone, name) <= 5e-3, name
    assert len({round(loss, 3) for loss in alone.column("train/after").values()}) == 4  # it trains


class Marked(LanguageModel):
    """Marks weights that are not decayed by attributes, as Mamba does."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.transformer.blocks:
            block.mlp.input.weight._no_weight_decay = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kept = [one for one in self.parameters() if hasattr(one, "_no_weight_decay")]
        others = [one for one in self.parameters() if not hasattr(one, "_no_weight_decay")]
        return torch.optim.AdamW([{"params": kept, "weight_decay": 0.0}, {"params": others, "weight_decay": 5.0}], 0.01)


MARKED = replace(LANGUAGE, module=partial(Marked, ADAMW), micro_batch=None)


@pytest.mark.parametrize("strategy", ["fsdp", *at_night(TENSOR_PARALLEL.replace("LanguageModel", "Marked"))])
def test_attributes_of_parameters_stay(strategy: str, fits: Fits) -> None:
    (alone,), sharded = fits(MARKED), fits(replace(MARKED, strategy=strategy), 2)[0]
    assert largest_difference(sharded, alone) <= 1e-5


class HooksGradients(LanguageModel):
    def __init__(self, hook: str, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.free = nn.Parameter(torch.ones(4))
        getattr(self.free, hook)(lambda _: None)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_is_refused(hook: str, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(LANGUAGE, module=partial(HooksGradients, hook, ADAMW), strategy="fsdp"), 2)
    assert str(failed.value.error).startswith("free has a hook on its gradient (register_hook, register_post_")


class HooksLater(PlainModel):
    def on_fit_start(self) -> None:
        self.net[0].weight.register_hook(lambda _: None)


class Stateless(PlainModel):
    """Computes with weights of the moment in the place of its own."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        weights = {name: 0.9 * parameter for name, parameter in self.net.named_parameters()}
        return nn.functional.cross_entropy(torch.func.functional_call(self.net, weights, (batch[0],)), batch[1])


class Held(PlainModel):
    """Holds a weight outside of modules, as its constructor found it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = (self.net[0].weight,)

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.first[0].mul_(0.9)


class HeldInAnOptimizer(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.AdamW(self.parameters(), 0.05)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.made


REFUSED = {
    HooksLater: "net.0.weight has a hook on its gradient (register_hook, register_post_",
    Stateless: "another tensor stands in for net.0.weight, net.0.bias, as torch.func.functional_call and an ",
    Held: "net.0.weight is used as the constructor held it, in an optimizer or a list, but a sharded strategy trains ",
    HeldInAnOptimizer: "net.0.weight is used as the constructor held it",
    OwnSharding: "OwnSharding shards itself in configure_model; leave fully_shard and parallelize_module to the ",
    NothingToShard: "there is nothing to shard in NothingToShard; use strategy=ddp",
    Lazy: "net.1.weight, net.1.bias: a lazy layer (LazyLinear, or -1 channels) has no shape before its first ",
}


@pytest.mark.parametrize("module", REFUSED)
def test_a_module_whose_tensors_would_be_passed_over_is_refused(module: Any, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(CLASSIFIER if issubclass(module, Classifier) else PLAIN, module=module, strategy="fsdp"), 2)
    assert str(failed.value.error).startswith(REFUSED[module])


def test_a_replicated_parameter_that_one_rank_alone_uses_is_averaged(fits: Fits) -> None:
    used = replace(PLAIN, module=UsedByRank0)
    alike = fits(replace(used, strategy="ddp find_unused_parameters=true"), 2)[0]
    assert largest_difference(fits(replace(used, strategy="fsdp"), 2)[0], alike) <= 1e-5


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), *at_night(("fsdp_hybrid shard_size=2", 4))])
def test_sharded_parameters_that_one_rank_alone_uses_have_zero_gradients_on_others(
    strategy: str, ranks: int, fits: Fits
) -> None:
    used = replace(PLAIN, module=UsedUnevenly, micro_batch=24 // ranks // 2)
    alike = fits(replace(used, strategy="ddp find_unused_parameters=true"), ranks)[0]
    uneven = fits(replace(used, strategy=strategy), ranks)[0]
    assert largest_difference(uneven, alike) <= 1e-5
    assert max(float((uneven.end[name] - value).abs().max()) for name, value in alike.end.items()) <= 1e-5
    assert torch.equal(uneven.end["never.weight"], uneven.start["never.weight"])  # no weight decay either


class Branching(nn.Module):
    """A block, of whose branches it takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, is_one: bool) -> torch.Tensor:
        return x + torch.tanh((self.one if is_one else self.other)(x))


class Blocks(PlainModel):
    """Ranks take the branches of each block in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Branching() for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = self._through(block, x)
        return nn.functional.cross_entropy(self.last(x), batch[1])

    def _through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        is_one = self.global_rank == 0
        return block(block(x, is_one), not is_one)


class OtherBlocks(Blocks):
    """Each rank leaves out another block, of one shape."""

    def _through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if block is self.blocks[self.global_rank] else block(x, True)


def test_branches_of_a_unit_that_runs_several_times_are_not_mixed(fits: Fits) -> None:
    alike = fits(replace(PLAIN, module=Blocks, strategy="ddp find_unused_parameters=true"), 2)[0]
    sharded = fits(replace(PLAIN, module=Blocks, strategy="fsdp"), 2)[0]
    assert max(float((sharded.end[name] - value).abs().max()) for name, value in alike.end.items()) <= 1e-5


def test_ranks_that_run_other_blocks_of_one_shape_are_refused(fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(PLAIN, module=OtherBlocks, strategy="fsdp"), 2)
    assert str(failed.value.error).startswith("the ranks run different blocks of the model in one step, and fsdp ")
