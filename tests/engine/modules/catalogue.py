"""The modules of this folder, one for each idiom, each with its data and with the run that it is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lightning.pytorch as pl

from tests.engine.modules import data, optimization, sequence, structured, vision

SINGLE, MICRO, TWO_RANKS = "single", "single in micro batches", "ddp"  # runs that others are held to

OWN_BATCH = "its loss is over the device's own batch"
NOISE = "its step draws noise, by the device"
OWN_PYTHON = "it has a state in Python, which no checkpoint has, and is not resumed here"
OWN_STATE = "it changes state by what the device itself has seen"


@dataclass(frozen=True)
class Entry:
    """A module of the catalogue.

    Args:
        reference: the run that it is held to, one process with whole batches unless ``because`` says why not.
        cuts: there is a plan for tensor parallelism.
        resumes: all of its state is in a checkpoint.
        is_clipped: gradients are clipped by their norm, if it does not do so itself; torch has none of sparse ones, and
            LBFGS goes by their differences.
    """

    module: Callable[[], pl.LightningModule]
    data: Callable[[], pl.LightningDataModule]
    reference: str = SINGLE
    because: str = ""
    cuts: bool = False
    resumes: bool = True
    is_clipped: bool = True

    @property
    def name(self) -> str:
        return self.module.__name__

    @property
    def sentence(self) -> str:
        return (self.module.__doc__ or "").partition("\n")[0]


v, q, t, o = vision, sequence, structured, optimization
_PLAIN = (
    *(o.Classifier, o.StepsCounted, o.SpectralNorm, o.MultiTask, o.AccumulatesByHand, o.TwoBackward),
    *(o.MaxNorm, o.WarmRestarts, o.Plateau, o.Warmup, o.Averaged, o.GradientHooks, o.SkipsBatches, o.StepsByHand),
    *(o.LogsOfEveryKind, o.ShowsPictures, o.ScheduleFree),
)
FIELDS = {
    "Self-supervised vision": [
        *(Entry(m, data.VIEWS) for m in (v.MoCo, v.CLIP, v.SwAV)),
        Entry(v.KNNMonitor, data.VIEWS, TWO_RANKS, "it evaluates on the device's own samples"),
        Entry(v.SimCLR, data.VIEWS, MICRO, OWN_BATCH),
    ],
    "Generative": [
        *(Entry(m, data.NOISED) for m in (v.LatentDiffusion, v.EmaCopy, v.VQEma, v.RealNVP)),
        *(Entry(m, data.NOISED) for m in (v.GAN, v.GradientPenalty)),
        Entry(v.DDPM, data.NOISED, TWO_RANKS, NOISE),
        *(Entry(m, data.NOISED, MICRO, OWN_STATE) for m in (v.VQDataInit, v.Glow)),
    ],
    "Sequences": [
        *(Entry(m, data.LINES, cuts=True) for m in (q.TiedLanguageModel, q.PromptTuning)),
        *(Entry(m, data.LINES) for m in (q.Checkpointed, q.MixtureOfExperts, q.TBPTT, q.RecurrentCells)),
        Entry(q.SpeechCTC, data.SPEECH),
        Entry(q.Word2Vec, data.PAIRS, is_clipped=False),
        Entry(q.Stateful, data.LINES, TWO_RANKS, OWN_PYTHON, resumes=False),
    ],
    "Structured data and control": [
        Entry(t.GraphNetwork, data.GRAPHS),
        Entry(t.PhysicsInformed, data.POINTS),
        Entry(t.MAML, data.TASKS),
        Entry(t.Snapshot, data.IMAGES),
        Entry(t.DQN, data.TRANSITIONS),
        Entry(t.Detection, data.SCENES, MICRO, OWN_BATCH),
    ],
    "Optimization and logging": [
        *(Entry(m, data.IMAGES) for m in _PLAIN),
        Entry(o.LBFGS, data.IMAGES, is_clipped=False),
        Entry(o.BatchNorm, data.IMAGES, TWO_RANKS, "a batch norm has the statistics of the device's own batch"),
        Entry(o.Dropout, data.IMAGES, TWO_RANKS, NOISE),
        Entry(o.RunningNorm, data.IMAGES, TWO_RANKS, OWN_STATE),
    ],
}
CATALOGUE = {entry.name: entry for entries in FIELDS.values() for entry in entries}
