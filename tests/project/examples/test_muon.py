"""optimizer=muon: its update, its groups, and the same curve under each strategy that takes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightswitch.errors import Refused
from lightswitch.strategies.elementwise import refuse_in_pieces
from project.models.gpt import GPT
from project.muon import Muon, orthogonalized
from tests.runs import Train

SHORT = (
    "model=gpt",
    "model.width=32",
    "optimizer=muon",
    "scheduler=wsd",
    "scheduler.total_steps=4",
    "trainer.accelerator=cpu",
)
SHORT += ("global_batch_size=8", "trainer.max_steps=4", "trainer.log_every_n_steps=1", "model.sample_tokens=0")
SHORT += ("trainer.limit_val_batches=1", "trainer.limit_test_batches=1")


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_an_update_has_singular_values_of_about_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape) @ torch.diag(torch.logspace(0, 1, shape[1]))
    values = torch.linalg.svdvals(orthogonalized(matrix, torch.float32))
    assert values.min() > 0.6  # Jordan's coefficients end within 0.7 to 1.2
    assert values.max() < 1.3


def test_a_step_is_that_of_torch_muon_and_adamw() -> None:
    torch.manual_seed(0)
    matrix, vector = torch.nn.Parameter(torch.randn(4, 6)), torch.nn.Parameter(torch.randn(6))
    others = [torch.nn.Parameter(one.detach().clone()) for one in (matrix, vector)]
    theirs = [
        torch.optim.Muon(others[:1], lr=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others[1:], lr=0.1, weight_decay=0.1, betas=(0.9, 0.95)),
    ]
    own = Muon([{"params": [matrix, vector]}], lr=0.1)
    assert [group["is_muon"] for group in own.param_groups] == [True, False]
    for _ in range(3):
        for parameter in (matrix, vector, *others):
            parameter.grad = parameter.detach().cos()
        for optimizer in (own, *theirs):
            optimizer.step()
    assert torch.equal(vector, others[1])
    assert torch.allclose(matrix, others[0], atol=2e-3)  # torch's iterates in bfloat16


def test_matrices_of_blocks_use_muon_and_embeddings_and_norms_use_adamw(gpt: Callable[..., GPT]) -> None:
    model = gpt(tied=False)
    names = {parameter: name for name, parameter in model.named_parameters()}
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    for group in Muon.groups(model):
        kinds[group["is_muon"]] |= {names[parameter] for parameter in group["params"]}
    assert kinds[True] | kinds[False] == {*names.values()}
    assert all(".blocks." in name and name.endswith("weight") and "norm" not in name for name in kinds[True])
    assert {"tokens.weight", "head.weight", "transformer.norm.weight"} <= kinds[False]
    assert not any("norm" not in name and ".blocks." in name for name in kinds[False])
    with pytest.raises(ValueError, match=r"finds no linear layer in an nn\.ModuleList of the model; use adamw"):
        Muon.groups(torch.nn.Linear(2, 2))


def test_flat_shards_are_refused() -> None:
    with pytest.raises(Refused, match=r"Muon does not update each element independently.*use strategy=ddp or fsdp"):
        refuse_in_pieces(Muon([torch.nn.Parameter(torch.ones(2, 2))]))


def test_muon_trains_the_same_steps_under_fsdp_and_goes_on_under_ddp(train: Train) -> None:
    alone = train(*SHORT, "strategy=single").column("train/loss")
    begun = train(*SHORT, "strategy=fsdp", "run_id=x", "trainer.max_steps=2", ranks=2)
    ended = train(*SHORT, "strategy=ddp", "run_id=x", ranks=2, folder=begun.folder)
    assert ended.column("train/loss") == pytest.approx(alone, abs=1e-5)


def test_torchs_muon_on_a_model_with_vectors_is_refused_in_a_line(train: Train) -> None:
    words = ("model=gpt", "optimizer._target_=torch.optim.Muon", "trainer.accelerator=cpu", "trainer.max_steps=1")
    assert "type optimizer=muon, which uses AdamW for the rest" in train(*words, check=False).refusal
