"""Datasets that the library `datasets` reads, and conversations of a chat template."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from project.data.chat import IGNORED, Chat
from project.data.hf_dataset import HFDataset
from tests.runs import Train

REQUIRED = bool(os.environ.get("LIGHTSWITCH_REQUIRE_ALL"))
needs_datasets = pytest.mark.skipif(find_spec("datasets") is None and not REQUIRED, reason="datasets is an extra")
needs_transformers = pytest.mark.skipif(find_spec("peft") is None and not REQUIRED, reason="transformers is an extra")

TEMPLATE = (
    "{% for message in messages %}<|[[ message['role'] ]]|>[[ message['content'] ]]<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHORT = ("trainer.accelerator=cpu", "trainer.max_steps=4", "trainer.log_every_n_steps=1", "global_batch_size=8")
SHORT += ("trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "model.sample_tokens=0")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of JSON lines whose names are those of the splits."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus").mkdir()
    for split, rows in (("train", 1200), ("validation", 60), ("test", 60)):
        lines = (json.dumps({"text": f"{split} {row}: " + "to be or not to be. " * 5}) for row in range(rows))
        (tmp_path / "corpus" / f"{split}.jsonl").write_text("\n".join(lines))
    return tmp_path / "corpus"


@needs_datasets
@pytest.mark.parametrize("streaming", [False, True], ids=["map-style", "streaming"])
def test_a_dataset_is_windows_of_its_documents(corpus: Path, streaming: bool) -> None:
    data = HFDataset(str(corpus), context=32, streaming=streaming)
    data.prepare_data()
    data.setup("fit")
    inputs, targets = next(iter(data.val_dataloader()))
    text = (f"validation {row}: " + "to be or not to be. " * 5 + "\0" for row in range(60))
    expected = np.frombuffer("".join(text).encode()[: 64 * 32 + 1], dtype=np.uint8)
    assert inputs.flatten().tolist() == expected[:-1].tolist()
    assert targets.flatten().tolist() == expected[1:].tolist()


@needs_datasets
def test_a_split_or_a_column_that_is_not_there_is_named(corpus: Path) -> None:
    (corpus / "test.jsonl").unlink()
    with pytest.raises(
        ValueError, match=r"data\.path=.*corpus: .*test.*; the splits of the dataset are read as train: train, val"
    ):
        HFDataset(str(corpus), context=32).setup("fit")
    with pytest.raises(ValueError, match=r"data\.text=body: .*corpus has the columns text"):
        HFDataset(str(corpus), context=32, text="body").setup("fit")
    data = HFDataset(str(corpus), context=32, splits={"train": "train[:90%]", "test": "train[90%:]"})
    data.setup("fit")
    assert len(data.splits["test"]) == pytest.approx(len(data.splits["train"]) / 9, rel=0.05)


@needs_datasets
@pytest.mark.parametrize("streaming", ["true", pytest.param("false", marks=pytest.mark.nightly)])
def test_a_dataset_trains_the_same_steps_on_two_devices_and_resumes(corpus: Path, streaming: str, train: Train) -> None:
    words = (*SHORT, "model=gpt", "model.width=32", "data=hf_dataset", f"data.path={corpus}", "scheduler=constant")
    words += (f"data.streaming={streaming}",)
    alone = train(*words, "strategy=single").column("train/loss")
    pair = train(*words, "strategy=ddp", "run_id=x", "trainer.max_steps=2", ranks=2)
    found = train(*words, "strategy=ddp", "run_id=x", ranks=2, folder=pair.folder).column("train/loss")
    assert found == pytest.approx(alone, abs=1e-5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(vocab=letters, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<end>", "<|user|>", "<|assistant|>"]
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", extra_special_tokens=special[1:])
    made.chat_template = TEMPLATE.replace("[[", "{" * 2).replace("]]", "}" * 2)
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> str:
    lines = []
    for number in range(40):
        said = [("user", f"{number}?"), ("assistant", f"it is {number}"), ("user", "sure?"), ("assistant", "yes")]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "chats.jsonl")


@needs_transformers
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_only_answers_and_their_ends_are_trained_on(chats: str, tokenizer: Path, packing: bool) -> None:
    data = Chat(chats, context=64, tokenizer=str(tokenizer), packing=packing)
    data.setup("fit")
    inputs, targets = next(iter(data.val_dataloader()))
    assert len(inputs) == (2 if packing else 4)  # a conversation has 26 tokens or more
    shown = data.decode(inputs[0].tolist())
    assert shown.startswith("<|user|>0?<end><|assistant|>it is 0<end><|user|>sure?<end><|assistant|>yes")
    answers = [data.decode([one]) for one in targets[0].tolist() if one != IGNORED]
    first = "it is 0<end>yes<end>"
    assert "".join(answers).startswith(first)
    assert ("".join(answers) == first) is not packing
    assert sum(map(len, (data.splits["train"], data.splits["val"], data.splits["test"]))) < 41


@needs_transformers
def test_a_file_without_messages_and_a_tokenizer_without_a_template_are_refused(
    chats: str, tokenizer: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"text": "hello"}\n')
    with pytest.raises(ValueError, match=r"wrong\.jsonl, line 1: KeyError\('messages'\); expected an object with mess"):
        Chat(str(wrong), context=64, tokenizer=str(tokenizer)).setup("fit")
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (plain / name).write_text((tokenizer / name).read_text())
    with pytest.raises(ValueError, match=r"has no chat template; name the tokenizer of a chat model"):
        Chat(chats, context=64, tokenizer=str(plain))


@needs_transformers
def test_a_model_learns_answers_the_same_on_two_devices(chats: str, tokenizer: Path, train: Train) -> None:
    words = (
        *SHORT,
        "model=hf_causal_lm",
        "data=chat",
        f"data.files=[{chats}]",
        "scheduler=constant",
        "data.packing=true",
    )
    words += (f"model.tokenizer={tokenizer}", "model.context=64", "trainer.max_steps=3")
    sizes = (
        "vocab_size: 300, n_positions: 64, n_embd: 32, n_layer: 1, n_head: 2, bos_token_id: null, eos_token_id: null"
    )
    sizes += ", attn_pdrop: 0.0, embd_pdrop: 0.0, resid_pdrop: 0.0"
    words += ("model.config={model_type: gpt2, " + sizes + "}",)
    alone = train(*words, "strategy=single").column("train/loss")
    assert train(*words, "strategy=ddp", ranks=2).column("train/loss") == pytest.approx(alone, abs=1e-5)
