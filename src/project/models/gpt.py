"""A decoder-only transformer: language modelling over windows of token ids."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MeanMetric

from project.models.transformer import Embedding, Linear, Shape, Transformer, rotary
from project.optimizer import OptimizerFactory, SchedulerFactory, configured

PROMPT_TOKENS = 32  # of the test set, before the sample that a test run shows

Batch = tuple[Tensor, Tensor]  # token ids and the ids that follow them, each (batch, time)


class GPT(LightningModule):
    """The defaults are today's; `conf/model/gpt2.yaml` names GPT-2's.

    `sample_tokens` is the length of the text shown at the end of a test run; 0 shows none. With `document_end`, the id
    that ends a document, a token attends to its own document alone.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        mlp_width: int | None = None,
        dropout: float = 0.0,
        norm: Literal["layer", "rms"] = "layer",
        position: Literal["learned", "rotary"] = "rotary",
        mlp: Literal["gelu", "swiglu"] = "swiglu",
        bias: bool = False,
        tied: bool = True,
        init_std: float = 0.02,
        gradient_checkpointing: bool = False,
        sample_tokens: int = 256,
        document_end: int | None = None,
    ) -> None:
        super().__init__()
        self.shape = Shape(
            layers=layers,
            heads=heads,
            width=width,
            mlp_width=mlp_width,
            dropout=dropout,
            norm=norm,
            mlp=mlp,
            bias=bias,
            init_std=init_std,
            gradient_checkpointing=gradient_checkpointing,
        )
        check_sizes(self.shape, vocab_size, context, position)
        self.vocab_size, self.context = vocab_size, context
        self.position, self.tied = position, tied
        self.optimizer, self.scheduler = optimizer, scheduler
        self.evaluation_loss = MeanMetric()
        self.sample_tokens = sample_tokens
        self.document_end = document_end
        self.sample: Tensor | None = None

    def configure_model(self) -> None:
        """Layers are made here, where a strategy can spread them, so that a large model never is in every process."""
        if hasattr(self, "transformer"):
            return
        width, std = self.shape.width, self.shape.init_std
        self.tokens = Embedding(self.vocab_size, width, std=std)
        self.positions = Embedding(self.context, width, std=std) if self.position == "learned" else None
        self.dropout = nn.Dropout(self.shape.dropout)
        self.transformer = Transformer(self.shape)
        # A tied head has no module of its own: one parameter under one name, whatever moves or shards it.
        self.head = None if self.tied else Linear(width, self.vocab_size, bias=False, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (batch, time), time ≤ context, to logits (batch, time, vocab)."""
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(
                f"found a batch of {ids.dtype} of shape {tuple(ids.shape)}; expected token ids (batch, time), "
                "as data=python_source, text and text_shards have them"
            )
        time = ids.shape[1]
        if time > self.context:
            raise ValueError(
                f"found a window of {time} tokens, but the model's context is {self.context}; "
                f"set data.context={self.context} or model.context={time}"
            )
        x, rotation = self.tokens(ids), None
        if self.positions is not None:
            x = x + self.positions(torch.arange(time, device=ids.device))
        else:
            rotation = rotary(time, self.shape.head_width, like=x)
        mask = None if self.document_end is None else same_document(ids, self.document_end)
        x = self.transformer(self.dropout(x), rotation, mask)
        logits: Tensor = F.linear(x, self.tokens.weight) if self.head is None else self.head(x)
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch in nats a token."""
        ids, targets = batch
        return F.cross_entropy(self(ids).float().flatten(0, 1), targets.flatten())

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self.evaluation_loss.update(self.loss(batch), weight=batch[1].numel())

    def test_step(self, batch: Batch, batch_index: int) -> None:
        self.evaluation_loss.update(self.loss(batch), weight=batch[1].numel())
        if batch_index == 0 and self.sample_tokens and self.decode is not None:
            self.sample = self.continuation(batch[0])

    def predict_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The log-likelihood of each sequence in nats: (batch,)."""
        ids, targets = batch
        logits = self(ids).float()
        # of three dimensions, it has no deterministic kernel on GPUs
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return -nats.view_as(targets).sum(1)

    def on_validation_epoch_end(self) -> None:
        self.log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self.log_evaluation("test")
        if self.sample is not None and self.decode is not None:
            self.show(self.decode(self.sample.tolist()))

    def log_evaluation(self, stage: str) -> None:
        """The mean over all tokens of all ranks, which the metric gathers, and the perplexity of that mean."""
        loss = self.evaluation_loss.compute()
        self.evaluation_loss.reset()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/perplexity": loss.exp()})

    @property
    def decode(self) -> Any:
        """The data module's way from token ids to text, if it has one."""
        return getattr(getattr(self.trainer, "datamodule", None), "decode", None)

    def continuation(self, ids: Tensor) -> Tensor:
        """The beginning of the first window, continued.

        Within the test step and not after the last one, for there every strategy has the parameters at hand.
        """
        generator = torch.Generator(ids.device).manual_seed(0)
        return self.generate(ids[:1, :PROMPT_TOKENS], self.sample_tokens, temperature=0.8, generator=generator)[0]

    def show(self, text: str) -> None:
        self.print(f"\n{text}\n")
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("test/sample", text, self.global_step)

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


def same_document(ids: Tensor, document_end: int) -> Tensor:
    """Which tokens are before another, or are it, and in its document: (batch, 1, time, time)."""
    ends = (ids == document_end).long()
    document = ends.cumsum(1) - ends  # the token that ends one is of it
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def check_sizes(shape: Shape, vocab_size: int, context: int, position: str) -> None:
    for name, size in (("vocab_size", vocab_size), ("context", context)):
        if size < 1:
            raise ValueError(f"{name} is {size}; expected at least 1")
    if position not in ("learned", "rotary"):
        raise ValueError(f"position is {position!r}; use learned or rotary")
    if position == "rotary" and shape.head_width % 2:
        raise ValueError(
            f"rotary positions turn pairs of numbers, but a head has {shape.head_width} (width {shape.width} / "
            f"heads {shape.heads}); use width={shape.width + shape.heads}, or position=learned"
        )


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Logits (batch, vocab) to one id each: (batch, 1)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
