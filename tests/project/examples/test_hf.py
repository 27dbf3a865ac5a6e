"""Transformers' models: read without a copy on each rank, tuned by adapters, and given back."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import lightswitch
from lightswitch.checkpoints.reading import Reader
from lightswitch.export.__main__ import main
from project.hub import check_weights, read_tokenizer
from project.models.hf_causal_lm import HFCausalLM
from tests.runs import CHECKOUT, Train

pytestmark = pytest.mark.skipif(
    find_spec("peft") is None and not os.environ.get("LIGHTSWITCH_REQUIRE_ALL"), reason="transformers is an extra"
)

OF_PEFT = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", **SIZES, "vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= {"bos_token_id": None, "eos_token_id": None, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
SHORT = (
    "model.context=32",
    "global_batch_size=8",
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
    "trainer.accelerator=cpu",
)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama and a tokenizer that have learned README.md."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("pretrained")
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    words.train([str(CHECKOUT / "README.md")], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    sizes = {**SIZES, "vocab_size": 300, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    ids = torch.tensor(tokenizer((CHECKOUT / "README.md").read_text())["input_ids"])
    optimizer = ADAMW(model.parameters())
    for _ in range(60):
        windows = torch.stack([ids[start : start + 32] for start in torch.randint(len(ids) - 32, (16,))])
        model(input_ids=windows, labels=windows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def built(**options) -> HFCausalLM:
    model = HFCausalLM(32, ADAMW, **options)
    model.configure_model()
    return model


def logits(model, ids=None):
    ids = torch.arange(20).view(2, 10) if ids is None else ids
    with torch.no_grad():
        found = model.eval()(ids)
    return getattr(found, "logits", found)


def reread(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def test_a_pretrained_model_has_its_own_logits_and_ranks_that_are_sent_its_weights_read_and_draw_none(pretrained):
    assert torch.equal(logits(built(pretrained=str(pretrained))), logits(reread(pretrained)))
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = built(pretrained=str(pretrained), lora={"r": 2})
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"pretrained": "nobody/nothing"},
            "model.pretrained=nobody/nothing: there is no such .*, and downloads are",
        ),
        ({}, "model.pretrained=FOLDER"),
        ({"config": {**LLAMA, "max_position_embeddings": 16}}, "context is 32, but the model's maximum is 16"),
        ({"config": {"model_type": "gpt9"}}, "model_type=gpt9 is not a causal .* of transformers; did you mean gpt"),
        ({"config": {**GPT2, "n_embed": 16}}, "model.config.n_embed: GPT2Config has no such key; did you mean n_embd"),
        ({"config": {**GPT2, "n_embd": "wide"}}, "model.config: .*'n_embd' expected int, got str"),
        ({"config": LLAMA, "lora": {"rank": 2}}, "model.lora: .*rank.*; expected r, alpha"),
        (
            {"config": GPT2, "lora": {"target_modules": ["c_attn", "q_proj"]}},
            "target_modules: GPT2LMHeadModel has no q_proj; it has c_attn, c_fc, c_proj, lm_head",
        ),
        ({"config": GPT2, "lora": {"target_modules": ["ln_1"]}}, "model.lora: Target module LayerNorm.* not supported"),
    ],
)
def test_what_fits_no_model_is_refused_before_anything_is_read(options, told):
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        HFCausalLM(32, ADAMW, **options)


def test_a_folder_without_weights_that_can_be_read_is_refused(pretrained, tmp_path):
    folder, weights = tmp_path / "copied", tmp_path / "copied" / "model.safetensors"
    shutil.copytree(pretrained, folder)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"copied has weights that can't be read: "):
        HFCausalLM(32, ADAMW, pretrained=str(folder))
    weights.unlink()
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"lm_head.weight": "model-2-of-2.safetensors"}}'
    )
    with pytest.raises(ValueError, match=r"copied has no model-2-of-2\.safetensors"):
        HFCausalLM(32, ADAMW, pretrained=str(folder))


@OF_PEFT
@pytest.mark.parametrize("adapters", [{"r": 2}, {"r": 2, "use_dora": True}], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("kind", [LLAMA, GPT2], ids=lambda kind: kind["model_type"])
def test_merged_adapters_and_a_folder_of_peft_have_the_logits_of_the_model_beside_them(kind, adapters, tmp_path):
    model = built(config=kind, lora=adapters)
    untuned = logits(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_magnitude_vector" in name:
            parameter.data += torch.randn(parameter.shape) / 2
    tuned = logits(model)
    assert not torch.allclose(tuned, untuned, atol=1e-2)
    from peft import PeftModel

    for part in model.to_peft():
        part.save_pretrained(tmp_path)
    base, state = built(config=kind).model, model.model.state_dict().items()
    base.load_state_dict({name.replace(".base_layer.", "."): value for name, value in state if ".lora_" not in name})
    assert torch.allclose(logits(PeftModel.from_pretrained(base, tmp_path)), tuned, atol=1e-5)
    (hub,) = model.to_hf()
    assert torch.allclose(logits(hub), tuned, atol=1e-5)
    assert {name for name, _ in hub.named_parameters()} == {
        name for name, _ in built(config=kind).model.named_parameters()
    }


@pytest.mark.parametrize(
    "shape",
    [{"position": "learned", "mlp": "gelu", "bias": True}, {"norm": "rms"}, {"norm": "rms", "tied": False}],
    ids=["GPT-2", "Llama, tied", "Llama"],
)
def test_a_gpt_is_a_model_of_the_hub_of_its_shape_in_both_directions_and_one_of_another_none(shape, gpt, tmp_path):
    with pytest.raises(ValueError, match=r"no model for a GPT with position=rotary, mlp=swiglu, bias=False"):
        gpt().to_hf()
    one, other = gpt(seed=1, **shape), gpt(seed=2, **shape)
    (hub,) = one.to_hf()
    ids = torch.arange(8).view(1, 8)
    assert torch.allclose(logits(hub, ids), logits(one, ids), atol=1e-5)
    hub.save_pretrained(tmp_path)
    assert torch.equal(logits(reread(tmp_path), ids), logits(hub, ids))
    other.load_state_dict(other.from_hf(hub.state_dict()), strict=False)
    assert torch.equal(logits(other, ids), logits(one, ids))


@OF_PEFT
@pytest.mark.nightly
def test_a_tuned_model_is_killed_resumed_under_other_strategies_and_given_back(
    pretrained: Path, train: Train, tmp_path: Path
) -> None:
    (tmp_path / "rhyme.txt").write_text("the cat sat on the mat, and the rat sat on the cat. " * 700)
    words = ("experiment=finetune_lora", f"model.pretrained={pretrained}", f"data.files=[{tmp_path}/rhyme.txt]")
    words += (*SHORT, "optimizer.lr=0.02", "scheduler=constant", "callbacks.last_checkpoint.every_n_steps=4")
    words += ("model.lora={r: 8, alpha: 16, dropout: 0, target_modules: all-linear}",)
    whole = train(*words, "strategy=single", "trainer.max_steps=16")
    losses = list(whole.column("train/loss").values())
    assert sum(losses[-3:]) < sum(losses[:3]) - 3  # nats a token, of 3 steps
    before, after = re.split(r"^step ", whole.out, maxsplit=1, flags=re.MULTILINE)
    assert "cat" in before.split("\n\n", 1)[1]  # text of the model as it was, after a prompt
    assert "cat" in after.split("\n\n", 1)[1]  # and as it is
    folder = tmp_path / "other"

    def kill_once_saved(processes) -> None:
        while not list(folder.glob("runs/*/other/checkpoints/last.ckpt")) and all(one.is_alive() for one in processes):
            time.sleep(0.01)
        for one in processes:
            one.kill()

    words = (*words, "run_id=other")
    ddp = ("strategy=ddp", "trainer.max_steps=16")
    killed = train(*words, *ddp, ranks=2, folder=folder, meanwhile=kill_once_saved, check=False)
    assert killed.returncode != 0
    train(*words, "strategy=fsdp", "trainer.max_steps=10", ranks=2, folder=folder)
    train(*words, "strategy=fsdp_tp", "trainer.max_steps=13", ranks=2, folder=folder)
    last = "deepspeed_stage_3" if find_spec("deepspeed") else "fsdp_grad_op"
    other = train(*words, f"strategy={last}", "trainer.max_steps=16", ranks=2, folder=folder)
    assert list(other.column("train/loss").values()) == pytest.approx(losses, abs=1e-4)
    stored = other.run_dir / "checkpoints" / "step_16.ckpt"
    assert all(".lora_" in name for name in Reader(stored, group=None).weights_like)
    main([str(stored), "--format", "hf", "-o", str(tmp_path / "given")])
    assert torch.allclose(logits(reread(tmp_path / "given")), logits(lightswitch.load(stored)), atol=1e-5)
    assert not torch.allclose(logits(reread(tmp_path / "given")), logits(reread(pretrained)), atol=1e-2)
    from peft import PeftModel

    main([str(stored), "--format", "peft", "-o", str(tmp_path / "adapters")])
    tuned = PeftModel.from_pretrained(reread(pretrained), tmp_path / "adapters")
    assert torch.allclose(logits(tuned), logits(lightswitch.load(stored)), atol=1e-5)
    assert (tmp_path / "given" / "tokenizer.json").is_file()


def test_a_folder_of_the_hub_runs_no_code_and_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a user answers the question that transformers would ask."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "code.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    config = {"model_type": "mystery", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type=mystery is not a causal language model of transformers"):
        HFCausalLM(32, ADAMW, pretrained=str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}')
    with pytest.raises(ValueError, match="tokenizer: "):
        read_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config\.json is a pipe or a device, expected files; remove it"):
        HFCausalLM(32, ADAMW, pretrained=str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../model.safetensors"}}')
    with pytest.raises(ValueError, match=r"its index names a file outside of it, \.\./model\.safetensors"):
        check_weights(tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is no dependency")
def test_lm_eval_scores_an_exported_model(pretrained: Path, train: Train, tmp_path: Path) -> None:
    """The command of docs/checkpoints.md, with a task of one sentence."""
    (tmp_path / "notes.txt").write_text("the cat sat on the mat. " * 700)
    words = (
        "model=hf_causal_lm",
        f"model.pretrained={pretrained}",
        "data=hf_text",
        f"data.files=[{tmp_path}/notes.txt]",
    )
    run = train(*words, *SHORT, "strategy=single", "trainer.max_steps=2", "run_id=mine")
    main([str(run.run_dir), "--format", "hf", "-o", str(tmp_path / "mine")])
    sentence = "the cat sat"
    (tmp_path / "said.json").write_text(json.dumps({"text": sentence}))
    task = {"task": "said", "dataset_path": "json", "test_split": "test", "output_type": "loglikelihood_rolling"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "said.json")}}}
    task |= {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": [{"metric": "bits_per_byte"}]}
    (tmp_path / "said.yaml").write_text(json.dumps(task))
    typed = f"--model hf --model_args pretrained={tmp_path}/mine --device cpu --tasks said --include_path {tmp_path}"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "lm_eval", *typed.split()]
    told = subprocess.check_output(command, env=offline, cwd=tmp_path, text=True)
    ids = read_tokenizer(tmp_path / "mine")(sentence)["input_ids"]
    scores = logits(reread(tmp_path / "mine"), torch.tensor([[0, *ids]])).log_softmax(-1)[0]  # <end> is 0, and begins
    nats = -sum(float(scores[place, one]) for place, one in enumerate(ids))
    (found,) = re.findall(r"bits_per_byte\|[^|]*\|[^\d]*([\d.]+)", told)
    assert float(found) == pytest.approx(nats / math.log(2) / len(sentence), abs=1e-3)
