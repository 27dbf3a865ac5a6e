"""Models of transformers, cut over a tensor-parallel group by the plan that they bring, learn as whole ones."""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from project.models.hf_causal_lm import HFCausalLM
from project.models.hf_plan import tensor_parallel
from tests.runs import as_torchrun, context

pytestmark = pytest.mark.skipif(
    find_spec("peft") is None and not os.environ.get("LIGHTSWITCH_REQUIRE_ALL"), reason="transformers is an extra"
)

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# norms of single heads; layers whose outputs are put together again; a head that is tied; adapters in every layer
CUT = {
    "qwen3": ({"model_type": "qwen3"}, None),
    "phi3": ({"model_type": "phi3"}, None),
    "tied": ({"model_type": "llama", "tie_word_embeddings": True}, None),
    "adapters": ({"model_type": "llama"}, {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}),
}


def built(kind: dict[str, object], lora: dict[str, object] | None = None) -> HFCausalLM:
    torch.manual_seed(0)
    model = HFCausalLM(16, partial(torch.optim.AdamW, lr=1e-3), config={**SIZES, **kind}, lora=lora)
    model.configure_model()
    return model


def gradients(model: HFCausalLM) -> dict[str, torch.Tensor]:
    ids = torch.arange(34).view(2, 17) * 7 % 64
    model.loss((ids[:, :-1], ids[:, 1:])).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def cut_gradients(kind: str) -> dict[str, torch.Tensor]:
    """Those of the whole layers, from this process and the other one, which have a part of each layer."""
    model, mesh = built(*CUT[kind]), init_device_mesh("cpu", (2,))
    for path, style in tensor_parallel(model, 2).items():
        layer = model.get_submodule(path)
        trained = [parameter.requires_grad for parameter in layer.parameters()]
        parallelize_module(layer, mesh, style)
        for parameter, trains in zip(layer.parameters(), trained, strict=True):
            parameter.requires_grad_(trains)
    parameters = dict(model.named_parameters())
    return {
        name: one.redistribute(placements=parameters[name].placements).full_tensor()
        if isinstance(one, DTensor)
        else one
        for name, one in gradients(model).items()
    }


def other_process(environment: dict[str, str]) -> None:
    os.environ |= environment
    dist.init_process_group("gloo")
    for kind in CUT:
        cut_gradients(kind)
    dist.destroy_process_group()


@pytest.mark.nightly
def test_a_model_that_is_cut_has_the_gradients_of_a_whole_one(tmp_path: Path) -> None:
    with as_torchrun(2, tmp_path.name) as (own, others):
        process = context.Process(target=other_process, args=(others,))
        process.start()
        os.environ |= own
        dist.init_process_group("gloo")
        for kind in CUT:
            expected, found = gradients(built(*CUT[kind])), cut_gradients(kind)
            assert found.keys() == expected.keys(), kind
            for name, gradient in expected.items():
                assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5), (kind, name)
        dist.destroy_process_group()
        process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("kind", "lora", "told"),
    [
        ({"model_type": "gpt2"}, None, "no tensor-parallel plan for GPT2LMHeadModel; use strategy=fsdp"),
        (
            {"model_type": "mixtral"},
            None,
            r"has model\.layers\.0\.mlp\.experts as moe_tp_experts, which is",
        ),
        (
            {"model_type": "llama", "num_key_value_heads": 1},
            None,
            "ForCausalLM has num_key_value_heads=1, which",
        ),
        (
            {"model_type": "llama"},
            {"r": 2, "use_dora": True},
            "DoRA needs the norms of whole layers, but each",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(kind: dict[str, object], lora: dict[str, object] | None, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tensor_parallel(built(kind, lora), 2)


def test_a_plan_that_leaves_out_what_would_meet_a_part_is_refused() -> None:
    model = built({"model_type": "qwen3"})
    model.model.tp_plan = {name: style for name, style in model.model.tp_plan.items() if "norm" not in name}
    with pytest.raises(ValueError, match=r"shards .*\.q_proj, but not model\.layers\.0\.self_attn\.q_norm\.weight, "):
        tensor_parallel(model, 2)
