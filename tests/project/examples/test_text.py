"""Text and token files: every sample once, nothing of one split in another, and errors that say what to do."""

import math
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.data.text import HELD_OUT_BYTES, PythonSource, TextFiles
from project.data.tokens import TokenFiles
from project.data.windows import Windows
from project.models.language_model import printable


@given(length=st.integers(3, 300), context=st.integers(1, 40))
def test_an_epoch_predicts_each_token_but_the_first_once(length, context):
    if length <= context:
        return
    windows = Windows(np.arange(length, dtype=np.uint16), context)
    inputs, targets = windows.__getitems__(range(len(windows)))
    assert targets.flatten().tolist() == list(range(1, 1 + len(windows) * context))
    assert torch.equal(inputs + 1, targets)
    assert length - 1 - targets.numel() < context


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_bytes(bytes(np.random.default_rng(ord(name)).integers(1, 256, 500, np.uint8)))
    return tmp_path


def test_the_splits_are_all_of_the_text_in_the_order_of_the_names_hashes(texts):
    data = TextFiles([f"{texts}/*.txt"], context=8)
    data.setup("fit")
    files = sorted(texts.glob("*.txt"), key=lambda file: zlib.crc32(file.name.encode()))
    text = b"".join(file.read_bytes() for file in files)
    lengths = {"train": 3200, "val": 400, "test": 400}
    start = 0
    for split, length in lengths.items():
        ids = data.splits[split].__getitems__(range(len(data.splits[split])))[0].flatten().tolist()
        assert bytes(ids) == text[start : start + len(ids)]
        assert length - 8 - 1 <= len(ids) < length
        start += length


def test_overlapping_patterns_and_a_single_path_read_each_file_once(texts, monkeypatch):
    monkeypatch.setenv("HOME", str(texts))
    twice = TextFiles([f"{texts}/*.txt", f"{texts}/a.txt", f"{texts}/**", "~/*.txt"], context=8)
    assert len(twice.files) == 8
    assert [file.name for file in TextFiles(f"{texts}/a.txt", context=8).files] == ["a.txt"]


def test_files_that_are_missing_too_short_or_no_text_are_refused(texts):
    with pytest.raises(FileNotFoundError, match=r"data.files: no file matches .*none\*.md; give paths or globs"):
        TextFiles([f"{texts}/*.txt", f"{texts}/none*.md"], context=8)
    with pytest.raises(ValueError, match=r"500 bytes of text in 1 files; expected at least 650"):
        TextFiles(f"{texts}/a.txt", context=64)
    (texts / "d.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" * 99)
    with pytest.raises(ValueError, match=r"d\.png is not a text file: found a zero byte; leave it out of data\.files"):
        TextFiles([f"{texts}/*"], context=8).setup("fit")


def test_python_source_is_there_in_a_fixed_order_and_decodes():
    data = PythonSource(context=64)
    data.setup("fit")
    assert [file.name for file in data.files] == [file.name for file in PythonSource(context=64).files]
    assert len(data.splits["train"]) > 30_000
    assert len(data.splits["val"]) == len(data.splits["test"]) == (HELD_OUT_BYTES - 1) // 64
    ids, _ = data.splits["train"][0]
    assert data.files[0].read_bytes().decode().startswith(data.decode(ids.tolist()))


def write_tokens(folder: Path, **files: np.ndarray) -> Path:
    for name, tokens in files.items():
        tokens.astype(np.uint16).tofile(folder / f"{name}.bin")
    return folder


def test_token_files_are_mapped_and_the_validation_set_is_the_test_without_one(tmp_path):
    folder = write_tokens(tmp_path, train=np.arange(1000) + 50_000 - 1000, val=np.arange(100))
    data = TokenFiles(str(folder), context=8, vocab_size=50_000)
    assert TokenFiles(str(folder), context=8).largest_id == 49_999
    data.setup("fit")
    assert data.splits["train"][0][0].tolist() == list(range(49_000, 49_008))
    assert torch.equal(data.splits["test"][2][1], data.splits["val"][2][1])
    write_tokens(tmp_path, test=np.arange(100) + 7)
    data = TokenFiles(str(folder), context=8, vocab_size=50_000)
    data.setup("fit")
    assert data.splits["test"][0][0].tolist() == list(range(7, 15))


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    write_tokens(tmp_path, train=np.arange(100), val=np.array([256] * 100))
    with pytest.raises(ValueError, match=r"val.bin has token id 256, .* ends at 255; set model.vocab_size"):
        TokenFiles(str(tmp_path), context=8, vocab_size=256)


def test_token_files_that_are_missing_cut_or_too_short_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no train.bin and no val.bin; expected nanoGPT's token files"):
        TokenFiles(str(tmp_path), context=8, vocab_size=256)
    write_tokens(tmp_path, train=np.arange(100), val=np.arange(8))
    with pytest.raises(ValueError, match=r"val.bin has 16 bytes; expected .* more than 8 tokens"):
        TokenFiles(str(tmp_path), context=8, vocab_size=256)
    (tmp_path / "val.bin").write_bytes(b"123456789" * 3)
    with pytest.raises(ValueError, match=r"val.bin has 27 bytes; expected 2 for each token"):
        TokenFiles(str(tmp_path), context=8, vocab_size=256)


def test_what_an_untrained_model_draws_commands_no_terminal() -> None:
    assert printable("\x1b[2J owls\x07\n\tfly\x9b") == "�[2J owls�\n\tfly�"


# A stock Trainer


@pytest.fixture
def text(tmp_path):
    (tmp_path / "rhyme.txt").write_text("the cat sat on the mat, and the rat sat on the cat. " * 40)
    return TextFiles(f"{tmp_path}/rhyme.txt", context=8, batch_size=16)


def test_loss_is_the_mean_over_tokens_and_perplexity_its_exponential(gpt, trainer, text):
    model = gpt(vocab_size=256, sample_tokens=0)
    (tested,) = trainer().test(model, text, verbose=False)
    whole = text.splits["test"].__getitems__(range(len(text.splits["test"])))
    assert len(whole[0]) % 16  # the last batch is smaller, and counts for less
    loss = model.loss(whole).item()
    assert tested["test/loss"] == pytest.approx(loss, rel=1e-6)
    assert tested["test/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_a_test_run_ends_with_a_sample_that_tensorboard_keeps(gpt, trainer, text, tmp_path, capsys):
    logger = TensorBoardLogger(tmp_path)
    trainer(logger=logger).test(gpt(vocab_size=256, sample_tokens=20), text, verbose=False)
    prompt = text.decode(text.splits["test"][0][0].tolist())
    assert f"\n{prompt}" in capsys.readouterr().out
    events = EventAccumulator(logger.log_dir).Reload()
    assert events.Tags()["tensors"] == ["test/sample/text_summary"]


def test_a_wrapper_that_knows_single_samples_only_is_collated(text):
    text.setup("fit")
    train = text.splits["train"]
    inputs, targets = text.collate([train[2], train[5]])
    expected = train.__getitems__([2, 5])
    assert torch.equal(inputs, expected[0])
    assert torch.equal(targets, expected[1])
