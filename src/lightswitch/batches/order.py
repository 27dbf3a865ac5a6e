"""The samples that a rank reads, and their order: a function of (seed, epoch, step) and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DistributedSampler, Sampler, SequentialSampler

from lightswitch.batches.combined import Combined
from lightswitch.batches.plan import BatchPlan
from lightswitch.batches.randomness import mix
from lightswitch.batches.sampling import epoch_order


class TrainingSlices(Sampler[Any]):
    """Batch sampler of one rank: its slices of every global batch of an epoch.

    Step k takes ``order[k*G:(k+1)*G]`` of a global batch of G samples; micro batch m of rank r is slice
    ``m * replicas + r`` of it. A step that does not divide, as a smaller last one, is cut as evenly as possible. The
    length is that of a whole epoch, also when a resumed one yields only the rest, so that Lightning's notion of a last
    batch stays right. Beside a longer loader it may go through its samples several times an epoch, in another order
    each time.

    Args:
        sampler: the loader's own, which draws the order.
        samples: of an epoch, over all ranks.
        drop_last: leave out a last step that is smaller.
        rank: among the ``plan.replicas`` ranks that read different samples.
        epoch: where the run starts,
        step: and how many optimizer steps of that epoch are taken already.
        combined: the other training loaders of the run; None for a run of one.
    """

    def __init__(
        self,
        sampler: Any,
        samples: int,
        drop_last: bool,
        plan: BatchPlan,
        rank: int,
        seed: int,
        epoch: int,
        step: int,
        combined: Combined | None = None,
    ) -> None:
        self.base = sampler
        self.samples = samples  # of an epoch, over all ranks
        self.plan = plan
        self.rank = rank
        self.seed = seed
        self.start_at(epoch, step)
        self.own_steps = samples // plan.global_batch if drop_last else -(-samples // plan.global_batch)
        self.batch_size = plan.micro_batch  # DeepSpeed reads it
        self.combined = combined or Combined()
        self.index = self.combined.add(self)

    def __len__(self) -> int:
        if not self.combined.is_sized:  # then Lightning looks a batch ahead, for the epoch's last one
            raise TypeError("the length of an epoch is unknown: it ends with a stream")
        return self.steps * self.plan.accumulation

    @property
    def is_sized(self) -> bool:
        """Whether the number of samples is known before they are read."""
        return True

    @property
    def steps(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self.combined.steps_of(self.own_steps)

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch whose order the next iterator yields; Lightning calls it."""
        self.epoch = epoch

    def start_at(self, epoch: int, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Start elsewhere than was known when this was made, before the first batch.

        Args:
            state: what `state_at` has returned there.
        """
        self.epoch, self._resumed = epoch, (epoch, step)

    def state_at(self, step: int) -> dict[str, Any] | None:
        """Return what a resume at a step of the epoch needs beside its number: nothing, but for a stream."""
        return None

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        # A generator, so that epoch and step are read when the first batch is asked for: with workers,
        # DataLoader makes two iterators and uses one.
        epoch = self.epoch
        first = self._first_step()
        cycle = -1
        for step in range(first, self.steps):
            if step // self.own_steps != cycle:
                cycle = step // self.own_steps
                key = self._pass_key(epoch, cycle)
                order = self._order(epoch, cycle)
            for micro in range(self.plan.accumulation):
                yield key, self._chosen(order, step, micro)

    def _first_step(self) -> int:
        return self._resumed[1] if self.epoch == self._resumed[0] else 0

    def samples_of(self, step: int, micro: int) -> list[Any]:
        """Return the indices of this rank's samples in a micro batch of the current epoch."""
        return self._chosen(self._order(self.epoch, step // self.own_steps), step, micro)

    def _order(self, epoch: int, cycle: int) -> Sequence[Any]:
        key, told = self._pass_key(epoch, cycle), self._told_epoch(epoch, cycle)
        return epoch_order(self.base, self.samples, self.seed, key, told)

    @staticmethod
    def _told_epoch(epoch: int, cycle: int) -> int:
        """Return the epoch that a sampler or a dataset is told, which may take 31 bits, of the passes through it."""
        return epoch if cycle == 0 else mix(epoch, cycle) >> 33

    @property
    def epoch_samples(self) -> int:
        """Samples of one pass, over all ranks, without those that drop_last leaves out."""
        return min(self.samples, self.own_steps * self.plan.global_batch)

    @property
    def is_even(self) -> bool:
        """Whether the slices of every step have the same number of samples, also in the last step."""
        return self.plan.is_even and self.epoch_samples % self.plan.global_batch % self.plan.slices == 0

    def weight(self, step: int, micro: int) -> float:
        """Return the weight of the mean over a slice in the mean over its global batch; 1.0 for an even cut."""
        begin, end = self._bounds(step, micro)
        return (end - begin) * self.plan.slices / self.step_samples(step)

    def step_samples(self, step: int) -> int:
        """Return the samples of a step, over all ranks; fewer than the global batch in a last one."""
        return min(self.plan.global_batch, self.samples - step % self.own_steps * self.plan.global_batch)

    def _pass_key(self, epoch: int, cycle: int) -> int:
        """Return the number that stands for the epoch in a pass's order and randomness; the epoch itself for one
        loader."""
        return epoch if self.index == cycle == 0 else mix(epoch, cycle, self.index)

    def _chosen(self, order: Any, step: int, micro: int) -> list[Any]:
        begin, end = self._bounds(step, micro)
        chosen = order[begin:end] if end > begin else order[begin : begin + 1]
        return chosen.tolist() if hasattr(chosen, "tolist") else list(chosen)

    def _bounds(self, step: int, micro: int) -> tuple[int, int]:
        slices = self.plan.slices
        index = micro * self.plan.replicas + self.rank
        samples, offset = self.step_samples(step), step % self.own_steps * self.plan.global_batch
        begin, end = offset + samples * index // slices, offset + samples * (index + 1) // slices
        return min(begin, self.samples - 1), end  # an empty slice still reads one sample, at weight 0


class EvaluationSlices(Sampler[Any]):
    """Batch sampler of one rank: a contiguous share of the samples, each exactly once over all ranks.

    Every rank makes the same number of batches, as forward passes of sharded strategies are collective; so shares that
    differ by one sample are cut into batches that differ by one sample. Of fewer samples than ranks, the first rank has
    one, and those that have none read one of another's.

    Args:
        samples: over all ranks.
        batch: samples of one batch, at most.
        replicas: ranks that read different samples.
        seed: of the order, where the sampler draws one.

    Attributes:
        is_repeated: this rank has no sample of its own; see `lightswitch.batches.repeated`.
    """

    def __init__(self, sampler: Any, samples: int, batch: int, replicas: int, rank: int, seed: int) -> None:
        self.base = sampler
        is_in_order = type(sampler) in (SequentialSampler, DistributedSampler)
        self.order: Sequence[Any] = range(samples) if is_in_order else epoch_order(sampler, samples, seed, 0)
        self.begin, self.end = samples * rank // replicas, samples * (rank + 1) // replicas
        if samples < replicas:
            self.begin, self.end = -(-samples * rank // replicas), -(-samples * (rank + 1) // replicas)
        self.is_repeated = self.begin == self.end
        self.end += self.is_repeated
        self.begin, self.end = min(self.begin, samples - 1), min(self.end, samples)
        self.batches = max(1, min(-(-samples // (replicas * batch)), samples // replicas))
        self.batch_size = batch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[Any]]:
        share = self.order[self.begin : self.end]
        for index in range(self.batches):
            yield list(share[len(share) * index // self.batches : len(share) * (index + 1) // self.batches])
