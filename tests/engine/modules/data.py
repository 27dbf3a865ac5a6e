"""Small datasets of many kinds, made from numbers: a DataModule of each, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

CLASSES, WORDS, NODES = 4, 12, 5
Draw = Callable[[torch.Generator], Any]


class Samples(Dataset):
    def __init__(self, draw: Draw, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.samples = [draw(generator) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Data(pl.LightningDataModule):
    """Four steps of eight samples an epoch, and 13 samples to validate by."""

    def __init__(self, draw: Draw, collate: Callable[[list], Any] | None = None, samples: int = 32) -> None:
        super().__init__()
        self.draw, self.collate, self.samples = draw, collate, samples

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(self.draw, self.samples, 1), 8, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(self.draw, 13, 2), 8, collate_fn=self.collate)


class Images(Data):
    """The data of classifiers, by a name that a config can have."""

    def __init__(self) -> None:
        super().__init__(image)


def image(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """An image (1, 8, 8) whose brightest quarter is its class."""
    label = torch.randint(CLASSES, (), generator=generator)
    pixels = torch.randn(1, 2, 4, 2, 4, generator=generator)
    pixels[:, label // 2, :, label % 2] += 1.5
    return pixels.view(1, 8, 8), label


def views(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Two views (64,) of one image, and its class."""
    pixels, label = image(generator)
    one, other = (pixels.flatten() + 0.3 * torch.randn(64, generator=generator) for _ in range(2))
    return one, other, label


def noised(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """An image (64,), noise of its shape, and a time in 0…9, as a dataset with fixed noise gives them."""
    return (
        image(generator)[0].flatten(),
        torch.randn(64, generator=generator),
        torch.randint(10, (), generator=generator),
    )


def sentence(generator: torch.Generator) -> Tensor:
    """Three to seven words, each the last one's successor but by chance."""
    length = int(torch.randint(3, 8, (), generator=generator))
    skips = torch.randint(1, 3, (length,), generator=generator)
    return 1 + skips.cumsum(0) % (WORDS - 1)


def padded(sentences: list[Tensor]) -> dict[str, Tensor]:
    return {
        "words": pad_sequence(sentences, batch_first=True),
        "lengths": torch.tensor([len(one) for one in sentences]),
    }


def line(generator: torch.Generator) -> Tensor:
    """Eight words."""
    return 1 + torch.randint(1, 3, (8,), generator=generator).cumsum(0) % (WORDS - 1)


def utterance(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Frames (time, 6), eight to twelve of them, and two or three phones."""
    frames = torch.randn(int(torch.randint(8, 13, (), generator=generator)), 6, generator=generator)
    phones = torch.randint(1, 5, (int(torch.randint(2, 4, (), generator=generator)),), generator=generator)
    frames[: len(phones), 0] += phones
    return frames, phones


def spoken(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return frames (batch, time, 6), phones (batch, phones), and the lengths of both."""
    frames, phones = zip(*samples, strict=True)
    lengths = [torch.tensor([len(one) for one in many]) for many in (frames, phones)]
    return pad_sequence(frames, batch_first=True), pad_sequence(phones, batch_first=True), *lengths


def scene(generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """An image with one to three boxes (x, y, width, height) and their labels."""
    boxes = int(torch.randint(1, 4, (), generator=generator))
    target = {
        "boxes": torch.rand(boxes, 4, generator=generator),
        "labels": torch.randint(CLASSES, (boxes,), generator=generator),
    }
    return image(generator)[0], target


def scenes(samples: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    return torch.stack([pixels for pixels, _ in samples]), [target for _, target in samples]


def graph(generator: torch.Generator) -> dict[str, Tensor]:
    """Nodes (nodes, 4), edges (2, edges) and a number."""
    nodes = int(torch.randint(3, 7, (), generator=generator))
    features = torch.randn(nodes, 4, generator=generator)
    edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
    return {"x": features, "edges": edges, "y": features.sum().tanh()}


def joined(graphs: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Join graphs into one of all their nodes, as torch_geometric's Batch does."""
    sizes = [len(one["x"]) for one in graphs]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return {
        "x": torch.cat([one["x"] for one in graphs]),
        "edges": torch.cat([one["edges"] + start for one, start in zip(graphs, starts, strict=True)], 1),
        "graph": torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(sizes)),
        "y": torch.stack([one["y"] for one in graphs]),
    }


def molecule(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Positions (NODES, 3), energy and forces of springs to the origin."""
    positions = torch.randn(NODES, 3, generator=generator)
    return positions, positions.square().sum() / 2, -positions


def pair(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A user of 20 and an item of 30."""
    user = torch.randint(20, (), generator=generator)
    return user, (user + torch.randint(3, (), generator=generator)) % 30


def transition(generator: torch.Generator) -> dict[str, Tensor]:
    """A step in a world of four numbers and three actions, of a log of them."""
    state = torch.randn(4, generator=generator)
    action = torch.randint(3, (), generator=generator)
    return {
        "state": state,
        "action": action,
        "move": torch.randn(2, generator=generator).tanh(),
        "reward": state[action],
        "next": state.roll(1) + 0.1 * torch.randn(4, generator=generator),
    }


def task(generator: torch.Generator) -> dict[str, Tensor]:
    """A line to be learnt from five points, and five to be judged by."""
    slope, shift = torch.randn(2, generator=generator)
    x = torch.randn(10, 1, generator=generator)
    y = slope * x + shift
    return {"x": x[:5], "y": y[:5], "x_query": x[5:], "y_query": y[5:]}


IMAGES, VIEWS, NOISED = Images, *(partial(Data, draw) for draw in (views, noised))
SENTENCES, LINES, SPEECH = partial(Data, sentence, padded), partial(Data, line), partial(Data, utterance, spoken)
SCENES, GRAPHS, MOLECULES = partial(Data, scene, scenes), partial(Data, graph, joined), partial(Data, molecule)
PAIRS = partial(Data, pair)
TRANSITIONS, TASKS = partial(Data, transition), partial(Data, task)
