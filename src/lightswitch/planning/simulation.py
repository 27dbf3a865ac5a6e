"""Simulate training steps of a module on one device, with tensors that have shapes and no memory (fake tensors).

ledger.py records when each storage is allocated and freed. What a strategy shards, gathers and sends is no part of it:
estimate.py computes that from the parameters.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric

from lightswitch.errors import Refused, Unplanned
from lightswitch.failures.classify import one_line
from lightswitch.planning.ledger import FORWARD, MOST_ELEMENTS, UPDATE, Block, Ledger, Trace, Values, tensors_in
from lightswitch.planning.repeats import Repetition, repetitions
from lightswitch.strategies.callbacks import fuse
from lightswitch.strategies.sharded import checkpoint_activations, is_mostly_rounded
from lightswitch.strategies.units import find_units

_CPU = torch.device("cpu")  # fake tensors on another device need that device's driver


@dataclass(frozen=True)
class Work:
    """A module's training step, independent of the strategy.

    Attributes:
        model: builds the module.
        batch: returns a micro-batch with the given number of samples.
        is_cut: whether ``batch`` can return any number of samples; if not, all its batches have the same size.
        samples: number of samples in a micro-batch.
        options: Trainer arguments for the precision.
        units: names of the units; see `find_units`.
        recomputes: whether units recompute their activations in the backward pass.
    """

    model: Callable[[], LightningModule]
    batch: Callable[[int], Any]
    is_cut: bool
    samples: int
    options: Mapping[str, Any]
    units: Sequence[str] | None = None
    recomputes: bool = False


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        rows: size of the dimension that fsdp shards.
        state_bytes: what the optimizer holds for it.
        unit: index of the unit that gathers it; 0 if it is in none.
        is_rounded: whether autocast rounds it each time it is used, so that fsdp gathers it in 16 bits.
    """

    path: str
    rows: int
    numel: int
    bytes: int
    state_bytes: int
    is_trained: bool
    unit: int
    is_rounded: bool


@dataclass(frozen=True)
class Simulation:
    """Simulated steps of a module on one device.

    Attributes:
        samples, traces: two micro-batch sizes, and the step at each; the same twice if batches can't be cut.
        flops: floating-point operations at the first size.
        replaced: number of values that a micro-batch reads and that were replaced, by source line.
        split: paths of parameters whose layers are split by tensor parallelism.
    """

    weights: tuple[Weight, ...]
    units: int
    samples: tuple[int, int]
    traces: tuple[Trace, Trace]
    flops: float
    replaced: Mapping[str, int]
    split: Sequence[str] = ()


def simulate(work: Work) -> Simulation:
    """Simulate an optimizer step at two micro-batch sizes.

    The first step creates the optimizer's state, with twice the samples; the second one is measured.

    Raises:
        Unplanned: the step fails because it reads values of tensors.
        Refused: the module can't run. Its other exceptions propagate unchanged.
    """
    ledger = Ledger(FakeTensorMode(allow_non_fake_inputs=True))
    try:
        found = _simulated(work, ledger, repeats=True)
        if not ledger.is_uneven:
            return found
    except Exception:
        if not ledger.repeated:  # else a unit may need what another one of its kind does
            raise
    return _simulated(work, Ledger(FakeTensorMode(allow_non_fake_inputs=True)), repeats=False)


def _simulated(work: Work, ledger: Ledger, repeats: bool) -> Simulation:
    device = _Device(ledger, work, repeats)  # with its batches, which are loaded outside of all modes
    with _quiet():
        with torch.device("meta"):
            model = work.model()
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=device, max_epochs=1, limit_val_batches=0,
            use_distributed_sampler=False, barebones=True, **work.options,
        )  # fmt: skip
        try:
            trainer.fit(model, device.batches)
            weights = tuple(_weights(device))
        except (UnsupportedFakeTensorException, UnsupportedOperatorException) as error:
            raise Unplanned([f"a step needs tensor values ({error.args[0]})"]) from error
        except Refused:
            raise
        except Exception as error:
            raise _needing(ledger.values, error) from error
        finally:
            device.open.close()
    return Simulation(
        weights,
        1 + len(device.units),
        (work.samples, 2 * work.samples if work.is_cut else work.samples),
        device.batches.traces(),
        ledger.flops,
        dict(ledger.values.replaced),
    )


def _needing(values: Values, error: Exception) -> Exception:
    """Return the error to raise: `Unplanned` if replaced values may have caused it, else the error unchanged."""
    if "data is not allocated" in str(error):  # torch's, when C++ code reads a fake tensor
        return Unplanned(["a step reads tensor values in C++ code"])
    if values.replaced:
        first = next(iter(values.replaced))
        return Unplanned([f"a step reads tensor values at {first}, and fails with replaced ones: {one_line(error)}"])
    return error


class _Device(SingleDeviceStrategy):
    """A device without memory, on which Lightning's loop runs the module's steps."""

    def __init__(self, ledger: Ledger, work: Work, repeats: bool) -> None:
        super().__init__(_CPU)
        self.ledger, self.work, self.repeats = ledger, work, repeats
        self.batches = _Batches(work, ledger)
        self.units: dict[str, nn.Module] = {}
        self.rounded: set[nn.Parameter] = set()  # what autocast rounds of units that it rounds nearly all of
        self.open = ExitStack()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with torch.device("meta"):
            yield

    def setup(self, trainer: Trainer) -> None:
        model = self.lightning_module
        assert model is not None
        self.precision_plugin.convert_module(model)  # on the meta device: torch can't convert fake tensors
        _make_fake(model, self.ledger.fake)
        self.units = find_units(model, self.work.units)
        alike = repetitions(self.units) if self.repeats else []
        for unit in self.units.values() if self.work.recomputes else ():
            checkpoint_activations(unit)
        for same in alike:
            Repetition(self.ledger, same)
        for mode in (self.ledger.fake, self.ledger.places, self.ledger, self.ledger.values):
            self.open.enter_context(mode)
        self.setup_optimizers(trainer)
        for optimizer in self.optimizers:
            fuse(optimizer)
        if isinstance(self.precision_plugin, MixedPrecision):
            halved = [unit for unit in self.units.values() if is_mostly_rounded(unit)]
            parts = [part for unit in halved for part in unit.modules() if is_mostly_rounded(part)]
            self.rounded = {parameter for part in parts for parameter in part.parameters(recurse=False)}
        self.ledger.follow(model, self.optimizers, self.units, self.rounded)
        self.setup_precision_plugin()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **options: Any) -> Any:
        def passes() -> Any:
            self.ledger.phase = FORWARD
            result = closure()
            self.ledger.phase = UPDATE
            return result

        result = super().optimizer_step(optimizer, passes, *args, **options)
        self.ledger.phase = FORWARD
        return result

    def teardown(self) -> None:
        """Do nothing: it would move the model."""


def _make_fake(model: LightningModule, fake: FakeTensorMode) -> None:
    """Replace a module's parameters, buffers and metric states by fake CPU tensors. Tied parameters stay tied."""
    made: dict[Tensor, Tensor] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if tensor not in made:
            plain = tensor.detach()
            from_meta = fake.fake_tensor_converter.from_meta_and_device
            new = from_meta(fake, plain, _CPU) if plain.is_meta else fake.from_tensor(plain)
            made[tensor] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        return made[tensor]

    for part in model.modules():
        if isinstance(part, Metric) and part.device.type == "meta":
            part._apply(lambda tensor: torch.empty_like(tensor, device=_CPU))  # updates the metric's stored device
        kept = {name: value for name, value in vars(part).items() if name != "_modules"}
        vars(part).update(tree_map_only(Tensor, replaced, kept))


class _Batches:
    """Data loader of the simulated steps, which marks where each one begins and ends."""

    def __init__(self, work: Work, ledger: Ledger) -> None:
        self._work, self._ledger = work, ledger
        larger = 2 * work.samples if work.is_cut else work.samples
        self._given = [work.batch(size) for size in (larger, work.samples)]

    def __len__(self) -> int:
        return 3  # one more than are read: a scheduler may need a metric at the end of an epoch

    def __iter__(self) -> Iterator[Any]:
        for given in self._given:
            batch = tree_map_only(Tensor, self._copy, given)
            self._ledger.begin_step(batch)
            yield batch
            del batch
            self._ledger.end_step()

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the batch, as a fake one; small integers keep their values, from which sizes may follow."""
        if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > MOST_ELEMENTS:
            with self._ledger.fake:
                return self._ledger.fake.from_tensor(tensor).clone()
        with _disable_current_modes():
            return tensor.clone()

    def traces(self) -> tuple[Trace, Trace]:
        """Return the measured step, and the same step with twice the samples."""
        own, pairs = self._ledger.trace(1), self._pairs()
        if not self._work.is_cut:
            return own, own
        if pairs is not None:
            return own, self._ledger.trace(1, pairs)
        larger = self._ledger.trace(0)
        is_in_forward = np.cumsum(larger.phases != FORWARD) == 0  # later steps hold the last one's gradients there
        larger.held["gradients"][is_in_forward] += own.held["gradients"][0]
        return own, larger

    def _pairs(self) -> dict[Block, float] | None:
        """Return the bytes that each storage of step 1 has in step 0, or None if the steps do not correspond."""
        first, second = (self._ledger.of_passes(step) for step in (0, 1))
        sizes: dict[Block, float] = {}
        for a, b in zip_longest(first, second):
            if a is None or b is None or (a.kind, a.phase, a.place) != (b.kind, b.phase, b.place):
                return None
            sizes[b] = a.bytes
        return sizes


def _weights(device: _Device) -> Iterator[Weight]:
    units = list(device.units.values())
    unit_of = {parameter: number for number, unit in enumerate(units, 1) for parameter in unit.parameters()}
    halved = {unit_of[parameter] for parameter in device.rounded}
    assert device.lightning_module is not None
    for path, parameter in device.lightning_module.named_parameters():
        states = tensors_in([optimizer.state.get(parameter) for optimizer in device.optimizers])
        unit, is_rounded = unit_of.get(parameter, 0), parameter in device.rounded
        yield Weight(
            path, parameter.shape[0] if parameter.ndim else 1, parameter.numel(), parameter.nbytes,
            sum(one.nbytes for one in states if one.ndim), parameter.requires_grad,
            0 if unit in halved and not is_rounded else unit,  # the root gathers what such a unit keeps in 32 bits
            is_rounded,
        )  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence libraries and strategies in this context: their messages are meant for real runs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class Samples:
    """The start of the training data.

    Attributes:
        batch: returns a batch with the given number of samples, or the loader's own batch if that can't be cut.
        is_cut: whether batches can be cut to any number of samples.
        loaders: the training loaders, as Lightning gets them.
    """

    batch: Callable[[int], Any]
    is_cut: bool
    loaders: Any


def first_samples(
    model: LightningModule, data: LightningDataModule | None, shares_streams: bool = True, prepares_data: bool = True
) -> Samples:
    """Return the first samples of the training data of the data module or, without one, of the module.

    Args:
        shares_streams: whether to cut the batches of iterable datasets, too; if not, a micro-batch is the loader's
            own batch.
        prepares_data: whether to call the data module's `prepare_data`.

    Raises:
        Refused: there is no training data.
    """
    owner = model if data is None else data
    if not is_overridden("train_dataloader", owner):
        raise Refused(
            "a plan needs a batch of training data, and there is no training data; type data=NAME, or "
            "data._target_=CLASS of a LightningDataModule"
        )
    if data is not None:
        if prepares_data:
            data.prepare_data()
        data.setup("fit")
    given = owner.train_dataloader()
    loaders = given.iterables if isinstance(given, CombinedLoader) else given
    cut: list[bool] = []
    own = {id(loader): None if shares_streams else _own_batch(loader) for loader in tree_leaves(loaders)}
    tree_map(lambda loader: cut.append(_is_cut(loader) and own[id(loader)] is None), loaders)

    def batch(count: int) -> Any:
        return tree_map(lambda loader: _batch(loader, own[id(loader)] or count), loaders)

    return Samples(batch, all(cut), given)


def _is_cut(loader: object) -> bool:
    return isinstance(loader, DataLoader) and loader.batch_sampler is not None


def _own_batch(loader: object) -> int | None:
    """Return the batch size of a loader of an iterable dataset; None for other loaders."""
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return loader.batch_size if is_stream else None  # type: ignore[attr-defined]  # a DataLoader's


def _batch(loader: Any, count: int) -> Any:
    """Return a batch of a loader; of one that can be cut, without starting its worker processes."""
    if not _is_cut(loader):
        return next(iter(loader))
    if isinstance(loader.dataset, IterableDataset):
        return loader.collate_fn(_repeated(iter(loader.dataset), count))
    indices = _repeated((index for batch in loader.batch_sampler for index in batch), count)
    many = getattr(loader.dataset, "__getitems__", None)
    return loader.collate_fn(many(indices) if many else [loader.dataset[index] for index in indices])


def _repeated(samples: Iterable[Any], count: int) -> list[Any]:
    """Return ``count`` samples; if there are fewer, repeat them from the first.

    Raises:
        Refused: there are no samples.
    """
    found = list(islice(samples, count))
    if not found:
        raise Refused("the training set has no samples")
    return list(islice(cycle(found), count))
