"""A stream of windows over text that is tokenized while it is read."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from project.data.documents import Document, Piece, Reading, documents
from project.data.loaders import Pair
from project.data.tokenizer import Tokenizer

Tokens = NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Place:
    """Position at which reading a source continues.

    It is the token `token` of the document that begins at `offset`, in the `piece`th piece in the order of the pass.
    `windows` is the number of windows that the source has yielded in this epoch.
    """

    passes: int = 0
    piece: int = 0
    offset: int | None = None  # None: where the piece begins
    token: int = 0
    windows: int = 0


class Source:
    """The windows of one source, pass after pass, with the pieces in another order in each pass."""

    def __init__(self, stream: "TextStream", number: int, place: Place) -> None:
        self.stream, self.number, self.place = stream, number, place
        self.windows = self.one_pass(place)

    @property
    def name(self) -> str:
        pieces = self.stream.sources[self.number]
        return f"{len(pieces)} files, including {pieces[0].address}" if len(pieces) > 1 else pieces[0].address

    def take(self) -> Tokens | None:
        """Return the next window, or None at the end of a pass; the next call begins another pass."""
        if (window := next(self.windows, None)) is not None:
            return window
        self.place = Place(passes=self.place.passes + 1, windows=self.place.windows)
        self.windows = self.one_pass(self.place)
        return None

    def one_pass(self, start: Place) -> Iterator[Tokens]:
        stream, pieces = self.stream, self.stream.sources[self.number]
        order = stream.random(self.number, start.passes).permutation(len(pieces))
        offset, skipped, rest = start.offset, start.token, np.empty(0, np.uint8)
        for number in range(start.piece, len(pieces)):
            piece = pieces[order[number]]
            for document in documents(piece if offset is None else replace(piece, begin=offset), stream.reading):
                ids = with_end(document, stream.tokenizer)
                rest, skipped = np.concatenate([rest, ids[skipped:]]), 0
                while len(rest) > stream.context:
                    window, rest = rest[: stream.context + 1], rest[stream.context :]
                    # The window's last token, with which the next window begins, is in this document: before
                    # its tokens were added, the window was not complete.
                    taken = self.place.windows + 1
                    self.place = Place(start.passes, number, document.begin, len(ids) - len(rest), taken)
                    yield window
            offset = None


class TextStream(IterableDataset[Pair]):
    """Stream of windows of `context` tokens, each with the tokens that follow its own, from sources mixed by weight.

    An epoch lasts until each source has been read once; a source that ends earlier is read again, in another order. The
    order of pieces depends on (seed, epoch), and windows are shuffled within blocks of `buffer_windows`. Every reader
    of the stream gets all samples, whatever its rank or worker. `state_dict` contains the position of the next sample.

    Iteration raises ValueError for a source without a single window, and for text that can't be read.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Piece]],
        weights: Sequence[float],
        reading: Reading,
        tokenizer: Tokenizer,
        context: int,
        seed: int,
        buffer_windows: int = 1024,
    ) -> None:
        self.sources, self.weights = sources, np.array(weights) / sum(weights)
        self.reading, self.tokenizer, self.context = reading, tokenizer, context
        self.seed, self.buffer_windows, self.epoch = seed, buffer_windows, 0
        self.digest = self.digest_of_input()
        self.loaded: dict[str, Any] | None = None
        self.state: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next sample, as a few plain values."""
        return self.state or self.loaded or self.state_of([Place() for _ in self.sources], 0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state.

        Raises ValueError for a state of other files, or of another tokenizer, context, seed or buffer_windows.
        """
        if state["reads"] != self.digest:
            raise ValueError(
                "the saved position is of a stream with other sources, or another tokenizer, context, seed or "
                "buffer_windows; give the same data, or start a new run from the weights with init_from=PATH"
            )
        self.epoch, self.loaded, self.state = state["epoch"], state, None

    def __iter__(self) -> Iterator[Pair]:
        state, self.loaded, self.state = self.loaded, None, None
        if state is None or state["epoch"] != self.epoch:
            state = self.state_dict()
        given = state["given"]
        sources = [Source(self, number, Place(*place)) for number, place in enumerate(state["places"])]
        while True:
            places = [source.place for source in sources]
            block = list(self.block(sources))
            order = self.random(len(sources), sum(place.windows for place in places)).permutation(len(block))
            for count, number in enumerate(order[given:], given + 1):
                self.state = self.state_of(places, count)
                window = torch.from_numpy(block[number].astype(np.int64))
                yield window[:-1], window[1:]
            if len(block) < self.buffer_windows:
                return
            given = 0

    def block(self, sources: list[Source]) -> Iterator[Tokens]:
        """Yield the next windows of the mixture; fewer than `buffer_windows` at the end of the epoch."""
        for _ in range(self.buffer_windows):
            # the source furthest behind its share: after n windows, each has its share of n to within one window
            taken = np.array([source.place.windows for source in sources])
            source = sources[int(np.argmax(self.weights * (taken.sum() + 1) - taken))]
            if (window := source.take()) is None:
                if all(each.place.passes for each in sources):
                    return
                window = source.take()
            if window is None:
                raise ValueError(
                    f"found fewer than {self.context + 1} tokens in {source.name}; expected at least one window; "
                    "give more text, or a smaller model.context"
                )
            yield window

    def random(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.epoch, *key])

    def state_of(self, places: list[Place], given: int) -> dict[str, Any]:
        plain = [list(astuple(place)) for place in places]
        return {"epoch": self.epoch, "places": plain, "given": given, "reads": self.digest}

    def digest_of_input(self) -> str:
        """Return a digest that is equal for streams of the same windows in the same order, wherever their files are."""
        pieces = [
            [(piece.address.rsplit("/", 1)[-1], piece.begin, piece.end) for piece in source] for source in self.sources
        ]
        what = (pieces, self.weights.tolist(), astuple(self.reading), self.tokenizer.name, self.context, self.seed)
        return hashlib.sha256(repr((what, self.buffer_windows)).encode()).hexdigest()


def with_end(document: Document, tokenizer: Tokenizer) -> Tokens:
    """Return the tokens of a document, followed by its end token."""
    ids = tokenizer.encode(document.text)
    return np.append(ids, ids.dtype.type(tokenizer.document_end))
