"""The models and data are plain Lightning: a stock Trainer runs them, and what they log is right."""

import math

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.data.loaders import collate
from project.data.text import TextFiles
from project.schedule import WarmupDecay


@pytest.fixture
def text(tmp_path):
    (tmp_path / "rhyme.txt").write_text("the cat sat on the mat, and the rat sat on the cat. " * 40)
    return TextFiles(f"{tmp_path}/rhyme.txt", context=8, batch_size=16)


def test_a_gpt_learns_a_text_under_a_schedule(gpt, trainer, text):
    model = gpt(vocab_size=256, scheduler=WarmupDecay(total_steps=60))
    run = trainer(max_steps=60)
    run.fit(model, text)
    (tested,) = run.test(model, text, verbose=False)
    assert tested["test/loss"] < 1.5
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)


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


def test_without_a_way_to_text_there_is_no_sample(gpt, trainer, text, capsys):
    model = gpt(vocab_size=256)
    text.setup("test")
    trainer().test(model, text.test_dataloader(), verbose=False)
    assert model.sample is None


def test_text_beyond_the_vocabulary_is_told_before_the_first_step(gpt, trainer, text):
    told = r"token id 116, but the model's vocabulary ends at 99; set model\.vocab_size to the tokenizer's size"
    with pytest.raises(ValueError, match=told):
        trainer(max_steps=1).fit(gpt(vocab_size=100), text)


def test_predictions_are_one_number_for_each_sequence(gpt, trainer, text):
    predictions = torch.cat(trainer().predict(gpt(vocab_size=256), text))
    assert predictions.shape == (len(text.splits["test"]),)


def test_worker_processes_bring_the_same_batches(text):
    text.setup("fit")
    alone = list(text.val_dataloader())
    text.num_workers = 1
    for here, there in zip(alone, text.val_dataloader(), strict=True):
        assert torch.equal(here[0], there[0])


def test_a_wrapper_that_knows_single_samples_only_is_collated(text):
    text.setup("fit")
    train = text.splits["train"]
    inputs, targets = collate([train[2], train[5]])
    expected = train.__getitems__([2, 5])
    assert torch.equal(inputs, expected[0])
    assert torch.equal(targets, expected[1])
