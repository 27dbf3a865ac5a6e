"""Language, speech and time series: ragged batches, states that go on, weights that are shared."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.functional import cross_entropy, ctc_loss, gelu
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.engine.modules.data import WORDS

WIDTH = 16
Sentences = dict[str, Tensor]


class Layer(nn.Module):
    """A causal mean and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(gelu(self.up(self.norm(past))))


def cut(model: pl.LightningModule, size: int) -> dict[str, ParallelStyle]:
    """A plan for tensor parallelism."""
    return {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


class TiedLanguageModel(pl.LightningModule):
    """The head is the embedding, as in GPT-2; lines of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, words: Tensor, batch_idx: int) -> Tensor:
        return cross_entropy(self(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    def validation_step(self, words: Tensor, batch_idx: int) -> None:
        self.log("val/loss", cross_entropy(self(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-5)


class PaddedLanguageModel(TiedLanguageModel):
    """The mean over tokens that are not padding, with smoothed labels."""

    def training_step(self, batch: Sentences, batch_idx: int) -> Tensor:
        words = batch["words"]
        logits = self(words[:, :-1]).flatten(0, 1)
        return cross_entropy(logits, words[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1)

    validation_step = pl.LightningModule.validation_step


class PromptTuning(TiedLanguageModel):
    """Lester et al. 2021: a prompt is learnt in front of a frozen model."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(3, WIDTH) / 4)

    def forward(self, words: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(len(words), -1, -1), self.embedding(words)], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 3:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([self.prompt], lr=0.01, eps=1e-5)


class Checkpointed(TiedLanguageModel):
    """Layers whose activations are computed again in the backward pass."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class MixtureOfExperts(pl.LightningModule):
    """Fedus et al. 2021: tokens go to the expert that the router likes most; each expert is called in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in "abc"
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words).flatten(0, 1)
        gates, chosen = self.router(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            mixed.index_add_(0, rows, expert(x[rows]) * gates[rows, None])
        return self.head(x + mixed).unflatten(0, words.shape)

    def training_step(self, words: Tensor, batch_idx: int) -> Tensor:
        return cross_entropy(self(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-5)


class SpeechCTC(pl.LightningModule):
    """Ragged frames and phones, packed for a GRU, and Graves' connectionist temporal classification."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 5)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        frames, phones, times, lengths = batch
        packed = pack_padded_sequence(frames, times.cpu(), batch_first=True, enforce_sorted=False)
        heard, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        likely = self.head(heard).log_softmax(-1).transpose(0, 1)
        self.log("frames", times.float().mean(), batch_size=len(times))
        return ctc_loss(likely, phones, times, lengths, zero_infinity=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-5)


class Stateful(pl.LightningModule):
    """A recurrent state that goes on from batch to batch, as a tensor of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(WORDS, 8),
            nn.LSTM(8, 12, batch_first=True),
            nn.Linear(12, WORDS),
        )
        self.state: tuple[Tensor, Tensor] | None = None

    def training_step(self, words: Tensor, batch_idx: int) -> Tensor:
        read, state = self.lstm(self.embedding(words[:, :-1]), self.state)
        self.state = tuple(one.detach() for one in state)
        return cross_entropy(self.head(read).flatten(0, 1), words[:, 1:].flatten())

    def on_train_epoch_start(self) -> None:
        self.state = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TBPTT(pl.LightningModule):
    """Truncated backpropagation through time by hand: two optimizer steps a batch, each over half of its times."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.embedding, self.rnn, self.head = (
            nn.Embedding(WORDS, 8),
            nn.LSTM(8, 12, batch_first=True),
            nn.Linear(12, WORDS),
        )

    def training_step(self, words: Tensor, batch_idx: int) -> None:
        optimizer, state = self.optimizers(), None
        for start in (0, 4):
            piece = words[:, start : start + 4]
            read, state = self.rnn(self.embedding(piece[:, :-1]), state)
            state = tuple(one.detach() for one in state)
            loss = cross_entropy(self.head(read).flatten(0, 1), piece[:, 1:].flatten())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Word2Vec(pl.LightningModule):
    """Mikolov et al. 2013: sparse gradients of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.centers, self.contexts = nn.Embedding(20, 8, sparse=True), nn.Embedding(30, 8, sparse=True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        center, context = batch
        scores = (self.centers(center)[:, None] * self.contexts((context[:, None] + torch.arange(4)) % 30)).sum(-1)
        aims = torch.tensor([1.0, 0, 0, 0]).expand_as(scores)
        return nn.functional.binary_cross_entropy_with_logits(scores, aims)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.01, eps=1e-5)
