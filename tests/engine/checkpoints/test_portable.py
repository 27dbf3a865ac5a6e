"""Promise 2: what goes on from a checkpoint, and what is refused. Under any other strategy: tours/test_tours.py."""

from __future__ import annotations

import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

import lightswitch
from lightswitch.checkpoints import optimizers
from lightswitch.checkpoints.last import position_of
from lightswitch.checkpoints.reading import Reader
from lightswitch.errors import Refused, UnfitCheckpoint
from tests.engine.checkpoints.damages import flip
from tests.engine.conftest import PLAIN, PLAIN_DATA, Finished, Train, once, runs_in
from tests.engine.plain import PlainModel
from tests.night import at_night
from tests.runs import largest_difference

# Optimizers that keep state in another one inside of them


class Lookahead(Optimizer):
    """As that of torch_optimizer, which leaves out torch's constructor and has a state dict of its own form."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups, self.defaults = optimizer, optimizer.param_groups, optimizer.defaults
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        self.fast_state = optimizer.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for fast in group["params"] if group["counter"] == 0 else ():
                slow = self.state[fast].setdefault("slow_param", fast.detach().clone())
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)
            group["counter"] = (group["counter"] + 1) % 3
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({"state": state_dict["slow_state"], "param_groups": state_dict["param_groups"]})


class SAM(Optimizer):
    """As davda54's, whose base optimizer has the same groups."""

    def __init__(self, params: Iterable[Tensor], **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:
        loss = torch.enable_grad()(closure)()
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            self.state[parameter]["old_p"] = parameter.detach().clone()
            parameter.add_(parameter.grad, alpha=0.1)
        torch.enable_grad()(closure)()
        for parameter in parameters:
            parameter.copy_(self.state[parameter]["old_p"])
        self.base_optimizer.step()
        return loss


class WrappedModel(PlainModel):
    def __init__(self, wrapper: str) -> None:
        super().__init__()
        self.wrapper = wrapper

    def configure_optimizers(self) -> OptimizerLRScheduler:
        is_sam, parameters = self.wrapper == "SAM", self.parameters()
        optimizer = SAM(parameters, lr=0.05) if is_sam else Lookahead(torch.optim.AdamW(parameters, lr=0.05))
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}]


HERE = "model._target_=tests.engine.checkpoints.test_portable"
WRAPPED = f"{HERE}.WrappedModel"
TWO = (
    *("run_id=mine", PLAIN_DATA, "data.samples=60", "global_batch_size=12", "trainer.accelerator=cpu"),
    *("trainer.log_every_n_steps=1", "trainer.val_check_interval=100"),
)


@pytest.mark.parametrize(
    ("wrapper", "strategy"),
    [("SAM", "fsdp"), *at_night(("Lookahead", "single"), ("Lookahead", "fsdp"), ("SAM", "ddp"))],
)
def test_an_optimizer_inside_of_another_goes_on(wrapper: str, strategy: str, train: Train) -> None:
    run, options = (*TWO, WRAPPED, f"model.wrapper={wrapper}"), {} if strategy == "single" else {"ranks": 2}
    whole = train(*run, "strategy=single", "trainer.max_steps=9")
    first = train(*run, "strategy=single", "trainer.max_steps=4")
    again = train(*run, f"strategy={strategy}", "trainer.max_steps=7", folder=first.folder, **options)
    gone_on = train(*run, "strategy=single", "trainer.max_steps=9", folder=again.folder)
    assert largest_difference(gone_on, whole, "train/loss") <= 1e-6


@pytest.mark.nightly
def test_deepspeed_refuses_an_inner_optimizer(train: Train) -> None:
    words = ("model.wrapper=Lookahead", "strategy=deepspeed_stage_2", "trainer.max_steps=2")
    run = train(*TWO, WRAPPED, *words, ranks=2, check=False)
    assert "error: Lookahead(AdamW) has an inner optimizer, whose state DeepSpeed does not save; use" in run.err


class OwnForm(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": 1}


class CountsSteps(torch.optim.SGD):
    """Keeps a state of no parameter, as MADGRAD does."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", torch.zeros(())) + 1
        return super().step(closure)


def test_what_an_optimizer_keeps_of_no_parameter_goes_on() -> None:
    before, now = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, other = (CountsSteps(module.parameters(), lr=0.1, momentum=0.9) for module in (before, now))
    for _ in range(3):
        before(torch.ones(2)).sum().backward()
        optimizer.step()
    saved = optimizers.state_of(optimizer, before)
    optimizers.load(other, optimizers.groups_of(other, now), saved["state"], saved)
    assert other.state["k"] == 3
    assert torch.equal(other.state[now.bias]["momentum_buffer"], optimizer.state[before.bias]["momentum_buffer"])


class KeepsMasters(torch.optim.SGD):
    """Keeps weights in 32 bits, a count and a mask beside parameters in 16 bits, as many write it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            state = self.state[parameter]
            if not state:
                state |= {"master": parameter.float(), "count": torch.zeros((), dtype=torch.long)}
                state |= {"mask": torch.ones_like(parameter, dtype=torch.bool)}
            state["count"] += 1
            state["master"] -= 1e-4 * state["mask"]
            parameter.copy_(state["master"])


def test_options_that_an_inner_optimizer_shares_go_on() -> None:
    before, now = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, other = (
        Lookahead(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)) for module in (before, now)
    )
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    saved = optimizers.state_of(optimizer, before)
    optimizers.load(other, optimizers.groups_of(other, now), saved["state"], saved)
    for one in (other, other.optimizer):
        assert (one.param_groups[0]["lr"], one.param_groups[0]["counter"]) == (0.05, 1)


@pytest.mark.parametrize("kind", [KeepsMasters, lambda *args, **options: Lookahead(KeepsMasters(*args, **options))])
def test_state_of_another_dtype_than_its_parameter_goes_on(kind: Callable[..., Optimizer]) -> None:
    before, now = (nn.Linear(2, 2, dtype=torch.bfloat16) for _ in range(2))
    optimizer, other = (kind(module.parameters(), lr=0.1) for module in (before, now))
    optimizer.step()
    saved = optimizers.state_of(optimizer, before)
    optimizers.load(other, optimizers.groups_of(other, now), saved["state"], saved)
    for key, value in optimizers.state_of(other, now)["state"]["weight"].items():
        assert value.dtype == saved["state"]["weight"][key].dtype, key
        assert torch.equal(value, saved["state"]["weight"][key]), key


def test_a_run_resumes_in_another_precision(saved: Path, train: Train) -> None:
    resumed = train(*SHORT, f"resume={saved}", "precision=bf16-true", "trainer.max_steps=6", "run_id=new")
    reader = Reader(resumed.run_dir / "checkpoints/last.ckpt", None)
    assert {reader.like[f"optimizer.0.net.0.weight.{key}"].dtype for key in ("exp_avg", "exp_avg_sq")} == {
        torch.bfloat16
    }
    assert reader.read("optimizer.0.net.0.weight.step") == 6


class OddBuffers(PlainModel):
    """Has a sparse buffer that it changes, two that grow, of which it restores the sizes, and two others."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("links", torch.eye(2).to_sparse())
        self.register_buffer("table", torch.eye(2).to_sparse(), persistent=False)
        self.register_buffer("queue", torch.zeros(0))
        self.register_buffer("marks", torch.zeros(0))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.links = (self.links * 0.9).coalesce()
        self.queue = torch.cat([self.queue, self.queue.new_full((1,), float(len(self.queue)))])
        self.marks = torch.cat([self.marks, self.queue[-1:]])
        batch[0] = torch.sparse.mm(self.links, batch[0].T).T + (self.queue + self.marks).mean() * self.table.sum()
        return super().training_step(batch, batch_idx)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.queue.resize_(state_dict[f"{prefix}queue"].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.marks = self.marks.new_zeros(checkpoint["state_dict"]["marks"].shape)


@pytest.mark.nightly
def test_sparse_and_growing_buffers_go_on(train: Train) -> None:
    run = (*TWO, f"{HERE}.OddBuffers", "strategy=single")
    whole = train(*run, "trainer.max_steps=8")
    first = train(*run, "trainer.max_steps=4")
    resumed = train(*run, "trainer.max_steps=8", folder=first.folder)
    assert resumed.column("train/loss") == whole.column("train/loss")
    loaded = lightswitch.load(resumed.run_dir / "checkpoints/last.ckpt")
    assert loaded.marks.tolist() == loaded.queue.tolist() == [*range(8)]
    assert loaded.links.to_dense()[0, 0] == pytest.approx(0.9**8)


def test_tensors_that_can_not_be_sent_are_refused(train: Train) -> None:
    refused = train(*TWO, f"{HERE}.OddBuffers", "strategy=ddp", ranks=2, check=False)
    assert refused.returncode == 2
    assert "links, rows, table: sparse and jagged tensors can't be sent to other devices" in refused.err


class TakesName(PlainModel):
    """Stores an entry of its own in a checkpoint."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[self.name] = 7


@pytest.mark.parametrize("name", ["position", *at_night("extra_state", "names_of_tied")])
def test_a_hook_that_takes_a_name_of_the_engine_is_refused_before_it_costs_the_run(name: str, train: Train) -> None:
    refused = train(*TWO, f"{HERE}.TakesName", f"model.name={name}", "trainer.max_steps=2", check=False)
    assert refused.returncode == 2
    (line,) = (line for line in refused.err.splitlines() if line.startswith("error: this checkpoint could not be read"))
    assert name in line


WHEN = ("tested", "after")  # names of checkpoints that are saved where no training goes on


class Small(PlainModel):
    """Removes an entry of checkpoints, for small files, and saves some where no training goes on."""

    def __init__(self, entry: str = "") -> None:
        super().__init__()
        self.entry = entry

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.pop(self.entry, None)

    def on_test_end(self) -> None:
        self.trainer.save_checkpoint("tested.ckpt")

    def teardown(self, stage: str) -> None:
        self.trainer.save_checkpoint("after.ckpt")


@pytest.mark.parametrize("entry", ["optimizer_states", *at_night("lr_schedulers", "loops")])
def test_a_checkpoint_without_what_a_resume_needs_says_so_and_gives_its_weights(entry: str, train: Train) -> None:
    run = (*TWO, f"{HERE}.Small", f"model.entry={entry}", "run_id=mine")
    first = train(*run, "trainer.max_steps=2")
    resumed = train(*run, "trainer.max_steps=4", folder=first.folder, check=False)
    assert f"step_2.ckpt can't be resumed: on_save_checkpoint has removed {entry}; to load" in resumed.refusal
    train(*TWO, f"{HERE}.Small", f"init_from={first.run_dir}/checkpoints/last.ckpt", "trainer.max_steps=2")


class Adapters(PlainModel):
    """Brings its frozen weights itself, and removes them from checkpoints."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.strict_loading = strict
        for parameter in self.net[0].requires_grad_(False).parameters():
            nn.init.constant_(parameter, 0.5)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in ("weight", "bias"):
            del checkpoint["state_dict"][f"net.0.{name}"]


@pytest.mark.nightly
def test_weights_that_a_module_brings_itself_may_be_removed_if_it_says_so(train: Train) -> None:
    run = (*TWO, f"{HERE}.Adapters")
    first = train(*run, "model.strict=true", "trainer.max_steps=2")
    resumed = train(*run, "model.strict=true", "trainer.max_steps=4", folder=first.folder, check=False)
    assert "the checkpoint has no net.0.bias; the checkpoint has no net.0.weight" in resumed.refusal
    assert "if the module brings these weights itself, set self.strict_loading = False in it" in resumed.refusal
    gone_on = train(*run, "model.strict=false", "trainer.max_steps=4", folder=first.folder)
    exports = (gone_on.run_dir / "checkpoints" / "last.ckpt", gone_on.run_dir / "model.ckpt")
    for loaded in map(lightswitch.load, exports):
        assert (loaded.net[0].weight == 0.5).all()
    with pytest.raises(UnfitCheckpoint, match="Missing key"):
        lightswitch.load(exports[0], model=Adapters(strict=True))


def test_what_is_saved_outside_of_training_is_written_whole_and_gives_its_weights(train: Train) -> None:
    first = train(*TWO, f"{HERE}.Small", "trainer.max_steps=2")
    tested = first.run_dir / "checkpoints" / "last.ckpt"
    evaluated = train(*TWO, f"{HERE}.Small", "mode=test", f"ckpt_path={tested}")
    for path in (folder / f"{name}.ckpt" for folder in (first.folder, evaluated.folder) for name in WHEN):
        assert torch.equal(Reader(path, None).read("model.net.0.bias"), Reader(tested, None).read("model.net.0.bias"))
        assert position_of(path) is None


def test_an_optimizer_whose_state_dict_has_more_than_its_state_is_refused() -> None:
    optimizer = OwnForm((module := nn.Linear(2, 2)).parameters(), lr=0.1)
    with pytest.raises(Refused, match="state_dict of OwnForm has mine, but checkpoints store only its state and"):
        optimizers.groups_of(optimizer, module)


class OutsideModel(PlainModel):
    """Trains a tensor that is no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.zeros(2, requires_grad=True)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam([*self.parameters(), self.shift], lr=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp", *at_night("single", "deepspeed_stage_2")])
def test_an_optimizer_over_what_is_no_parameter_is_refused_before_training(strategy: str, train: Train) -> None:
    options = {} if strategy == "single" else {"ranks": 2}
    refused = train(*TWO, f"{HERE}.OutsideModel", f"strategy={strategy}", check=False, **options)
    assert "Adam optimizes a tensor of shape (2,) that is not a parameter of the module" in refused.refusal


# What is found to differ between a checkpoint and the run that is to go on from it

SHORT = (*PLAIN, "run_id=mine", "trainer.accelerator=cpu", "trainer.val_check_interval=100", "strategy=single")
OTHERS = {
    "model.width=32": "was saved from a different model: model.width was 16, is 32; "
    "net.0.weight is 16×2 in the checkpoint and 32×2 in the model; ",
    "data.samples=201": "can't be resumed: it was trained on 200 samples, and the training set has 201 now; ",
    "seed=7": "can't be resumed: it was trained with seed=42, this run has 7; ",
    "model._target_=tests.engine.plain.SGDModel": "contains the state of AdamW over 4 parameters (net.0.weight, …), "
    "but this run has SGD over 4 parameters (net.0.weight, …); ",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = runs_in(tmp_path_factory.mktemp("saved"))(*SHORT, "trainer.max_steps=4")
    return run.run_dir / "checkpoints" / "step_4.ckpt"


@pytest.mark.parametrize("other", ["model.width=32", *at_night(*(one for one in OTHERS if one != "model.width=32"))])
def test_what_differs_is_told_in_a_line(other: str, saved: Path, train: Train) -> None:
    refused = train(*SHORT, f"resume={saved}", other, "trainer.max_steps=6", check=False)
    assert refused.refusal.startswith(f"{saved} {OTHERS[other]}")


@pytest.mark.nightly
def test_a_run_can_start_from_the_weights_alone(saved: Path, train: Train) -> None:
    others = ("data.samples=201", "global_batch_size=32", "model._target_=tests.engine.plain.SGDModel")
    run = (*SHORT, *others, "trainer.max_steps=6", "trainer.log_every_n_steps=1")
    begun, fresh = train(*run, f"init_from={saved}"), train(*run)
    assert list(begun.column("train/loss")) == [0, 1, 2, 3, 4, 5]
    assert begun.column("train/loss")[0] < fresh.column("train/loss")[0] - 0.1


def test_a_run_started_again_goes_on_and_not_from_the_initial_weights(saved: Path, train: Train) -> None:
    run = (*SHORT, f"init_from={saved}", "trainer.log_every_n_steps=1")
    first = train(*run, "trainer.max_steps=6")
    again = train(*run, "trainer.max_steps=8", folder=first.folder)
    whole = train(*run, "trainer.max_steps=8")
    assert again.column("train/loss") == whole.column("train/loss")


def test_a_run_that_starts_anew_leaves_the_checkpoints_of_the_one_before(saved: Path, train: Train) -> None:
    first = train(*SHORT, "trainer.max_steps=6")
    anew = train(*SHORT, "trainer.max_steps=2", "resume=never", folder=first.folder)
    names = {path.relative_to(anew.run_dir).as_posix() for path in anew.run_dir.glob("checkpoints*/step_*")}
    assert names == {"checkpoints/step_2.ckpt", "checkpoints_1/step_6.ckpt"}


HARMED = (*SHORT, "strategy=ddp", "callbacks.last_checkpoint.every_n_steps=2", "trainer.max_steps=4")


of_two = once(*HARMED, ranks=2)


@pytest.mark.nightly
@pytest.mark.parametrize("harmed", [["step_4"], ["step_4", "step_2"]], ids=["the newest", "all"])
def test_every_rank_knows_which_checkpoints_are_harmed(
    harmed: list[str], of_two: Finished, train: Train, tmp_path: Path
) -> None:
    """A bit or some of a tensor's file: nothing but its checksum tells."""
    shutil.copytree(of_two.folder, tmp_path / "again", symlinks=True)
    for name in harmed:
        flip(Random(3), tmp_path / "again" / f"runs/plainmodel/mine/checkpoints/{name}.ckpt/tensors_1.bin")
    again = train(*HARMED, "trainer.max_steps=5", ranks=2, folder=tmp_path / "again", check=False)
    damage = "can't be read as a checkpoint: tensors_1.bin differs from its checksum"
    told = [f"runs/plainmodel/mine/checkpoints/{name}.ckpt {damage}" for name in harmed]
    if len(harmed) == 2:
        advice = "start over with resume=never, or resume another one with resume=PATH"
        assert again.refusal == "; ".join([*told, advice])
    else:
        assert f"{told[0]}; skipping it\nresumes    runs/plainmodel/mine/checkpoints/step_2.ckpt\n" in again.out
        assert (again.returncode, again.out.count(told[0])) == (0, 1)
