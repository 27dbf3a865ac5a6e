"""What every language model does with its logits: its loss, its evaluation, and a sample of text."""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics import MeanMetric

from project.optimizer import OptimizerFactory, SchedulerFactory, configured

PROMPT_TOKENS = 32  # of the evaluated text, before the sample that a run shows

PADDING = -100  # in the place of a target
Batch = tuple[Tensor, Tensor]  # token ids and the ids that follow them, each (batch, time)


class LanguageModel(LightningModule):
    """Next-token prediction over windows of `context` token ids; a subclass has the layers, `forward` and `vocab_size`,
    how many token ids there are.

    Args:
        context: the longest window, in tokens.
        optimizer: what makes the optimizer of its parameters.
        scheduler: what makes the schedule of the learning rate; None for a constant one.
        sample_tokens: length of the text shown at the end of a test run; 0 shows none.
        samples_before: show a text before training, too.
    """

    vocab_size: int
    vocab_key = "model.vocab_size"  # what to type for another size

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
        """Token ids (batch, time), time ≤ context, to logits (batch, time, vocab)."""

    def setup(self, stage: str) -> None:
        """Raises ValueError for text with an id that the vocabulary has not, where the data say their `largest_id`."""
        largest = getattr(getattr(self.trainer, "datamodule", None), "largest_id", None)
        if largest is not None and largest >= self.vocab_size:
            raise ValueError(
                f"the data have token id {largest}, but the model's vocabulary ends at {self.vocab_size - 1}; "
                f"set {self.vocab_key} to the tokenizer's size (of bytes, 256), or choose the model that fits"
            )

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch in nats a token, of those whose target is not PADDING."""
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
        """The log-likelihood of each sequence in nats: (batch,)."""
        ids, targets = batch
        logits = self(ids).float()
        # of three dimensions, it has no deterministic kernel on GPUs
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return -nats.view_as(targets).sum(1)

    def on_validation_epoch_end(self) -> None:
        self.log_evaluation("val")
        self.show_sample("before")

    def on_test_epoch_end(self) -> None:
        self.log_evaluation("test")
        self.show_sample("test")

    def log_evaluation(self, stage: str) -> None:
        """The mean over all tokens of all ranks, which the metric gathers, and the perplexity of that mean."""
        loss = self.evaluation_loss.compute()
        self.evaluation_loss.reset()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/perplexity": loss.exp()})

    @property
    def decode(self) -> Any:
        """The data module's way from token ids to text, if it has one."""
        return getattr(getattr(self.trainer, "datamodule", None), "decode", None)

    def take_sample(self, batch: Batch, batch_index: int) -> None:
        """Continue the beginning of the first window.

        Within a step and not after the last one, for there every strategy has the parameters at hand.
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
        """`ids` (batch, time) with `tokens` more of each: sampled, or the likeliest at temperature 0."""
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(
                f"found temperature {temperature} and top_k {top_k}; use a temperature of 0 or more, top_k of 1 or more"
            )
        for _ in range(tokens):
            # A diverged model draws at random: its test run should still end with its metrics.
            logits = self(ids[:, -self.context :])[:, -1].float().nan_to_num()
            ids = torch.cat([ids, choose(logits, temperature, top_k, generator)], dim=1)
        return ids

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return configured(self, self.optimizer, self.scheduler)


def printable(text: str) -> str:
    """Text without what a terminal would take for a command, as an untrained model's bytes are."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)


def trained_tokens(batch: Batch) -> Tensor:
    """How many tokens the loss of a batch is a mean over."""
    return (batch[1] != PADDING).sum()


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Logits (batch, vocab) to one id each: (batch, 1)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
