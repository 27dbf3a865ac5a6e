"""Base class of language models, with their loss, evaluation and text sample."""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics.aggregation import MeanMetric

from project.optimizer import OptimizerFactory, SchedulerFactory, configured

PROMPT_TOKENS = 32  # of the evaluated text, as the prompt of the sample

PADDING = -100  # target of a token to ignore
Batch = tuple[Tensor, Tensor]  # token ids and the ids that follow them, each (batch, time)


class LanguageModel(LightningModule):
    """Next-token prediction over windows of `context` token ids.

    A subclass has the layers, `forward`, and `vocab_size`, the number of token ids.

    Args:
        context: length of the longest window, in tokens.
        optimizer: factory of the optimizer of its parameters.
        scheduler: factory of the learning-rate schedule; None for a constant rate.
        sample_tokens: length of the text shown at the end of a test run; 0 shows none.
        samples_before: also show a text before training.
    """

    vocab_size: int
    vocab_key = "model.vocab_size"  # key that sets the size

    def __init__(
        self,
        context: int,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        sample_tokens: int,
        samples_before: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        self.optimizer, self.scheduler = optimizer, scheduler
        self.evaluation_loss = MeanMetric()
        self.sample_tokens, self.samples_before = sample_tokens, samples_before
        self.sample: Tensor | None = None

    @abstractmethod
    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (batch, time, vocab) of token ids (batch, time), time ≤ context."""

    def setup(self, stage: str) -> None:
        """Raise ValueError if the data have an attribute `largest_id`, and that id is outside of the vocabulary."""
        largest = getattr(getattr(self.trainer, "datamodule", None), "largest_id", None)
        if largest is not None and largest >= self.vocab_size:
            raise ValueError(
                f"the data have token id {largest}, but the model's vocabulary ends at {self.vocab_size - 1}; "
                f"set {self.vocab_key} to the tokenizer's size (of bytes, 256), or choose the model that fits"
            )

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of a batch in nats per token, without those whose target is PADDING."""
        ids, targets = batch
        return F.cross_entropy(self(ids).float().flatten(0, 1), targets.flatten(), ignore_index=PADDING)

    def training_step(self, batch: Batch, batch_index: int) -> dict[str, Tensor]:
        return {"loss": self.loss(batch), "items": trained_tokens(batch)}

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self.evaluation_loss.update(self.loss(batch), weight=trained_tokens(batch))
        if self.samples_before and self.trainer.sanity_checking:
            self.take_sample(batch, batch_index)

    def test_step(self, batch: Batch, batch_index: int) -> None:
        self.evaluation_loss.update(self.loss(batch), weight=trained_tokens(batch))
        self.take_sample(batch, batch_index)

    def predict_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Return the log-likelihood of each sequence in nats: (batch,)."""
        ids, targets = batch
        logits = self(ids).float()
        # for three dimensions, it has no deterministic kernel on GPUs
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return -nats.view_as(targets).sum(1)

    def on_validation_epoch_end(self) -> None:
        self.log_evaluation("val")
        self.show_sample("before")

    def on_test_epoch_end(self) -> None:
        self.log_evaluation("test")
        self.show_sample("test")

    def log_evaluation(self, stage: str) -> None:
        """Log the mean over all tokens of all ranks, which the metric gathers, and the perplexity of that mean."""
        loss = self.evaluation_loss.compute()
        self.evaluation_loss.reset()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/perplexity": loss.exp()})

    @property
    def decode(self) -> Any:
        """The data module's function from token ids to text, or None if it has none."""
        return getattr(getattr(self.trainer, "datamodule", None), "decode", None)

    def take_sample(self, batch: Batch, batch_index: int) -> None:
        """Generate a continuation of the beginning of the first window.

        This happens within a step, in which every strategy has the parameters available, and not after the last one.
        """
        if batch_index == 0 and self.sample_tokens and self.decode is not None:
            ids = batch[0]
            generator = torch.Generator(ids.device).manual_seed(0)
            prompt = ids[:1, :PROMPT_TOKENS]
            self.sample = self.generate(prompt, self.sample_tokens, temperature=0.8, generator=generator)[0]

    def show_sample(self, stage: str) -> None:
        if self.sample is None or self.decode is None:
            return
        text, self.sample = printable(self.decode(self.sample.tolist())), None
        self.print(f"\n{text}\n")
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(f"{stage}/sample", text, self.global_step)

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return `ids` (batch, time) with `tokens` more in each row: sampled, or the likeliest at temperature 0."""
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(
                f"found temperature {temperature} and top_k {top_k}; use a temperature of 0 or more, top_k of 1 or more"
            )
        for _ in range(tokens):
            # A diverged model samples at random, so that its test run still ends with its metrics.
            logits = self(ids[:, -self.context :])[:, -1].float().nan_to_num()
            ids = torch.cat([ids, choose(logits, temperature, top_k, generator)], dim=1)
        return ids

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return configured(self, self.optimizer, self.scheduler)


def printable(text: str) -> str:
    """Replace characters that a terminal would interpret as commands, such as bytes of an untrained model."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)


def trained_tokens(batch: Batch) -> Tensor:
    """Return the number of tokens that a batch's loss is averaged over."""
    return (batch[1] != PADDING).sum()


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Return one id for each row of logits (batch, vocab): (batch, 1)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
