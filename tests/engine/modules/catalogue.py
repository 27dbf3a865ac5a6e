"""The modules of this folder, each with its data and with the run that it is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import lightning.pytorch as pl

from tests.engine.modules import data, generative, optimization, sequence, structured, vision_ssl

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


@dataclass
class Field:
    """Modules of one file."""

    title: str
    entries: list[Entry] = field(default_factory=list)


s, g, q, t, o = vision_ssl, generative, sequence, structured, optimization
_PLAIN = (
    *(o.Classifier, o.StepsCounted, o.SpectralNorm, o.MultiTask, o.Sharpness),
    *(o.AccumulatesByHand, o.TwoBackward, o.MaxNorm, o.OneCycle),
    *(o.Averaged, o.GradientHooks, o.SkipsBatches, o.LogsOfEveryKind, o.ShowsPictures, o.ScheduleFree),
)
FIELDS = [
    Field(
        "Self-supervised vision",
        [
            *(Entry(m, data.VIEWS) for m in (s.MoCo, s.BYOL, s.DINO, s.GatheredSimCLR, s.CLIP, s.SwAV)),
            Entry(s.KNNMonitor, data.VIEWS, TWO_RANKS, "it evaluates on the device's own samples"),
            Entry(s.SimCLR, data.VIEWS, MICRO, OWN_BATCH),
        ],
    ),
    Field(
        "Generative",
        [
            *(Entry(m, data.NOISED) for m in (g.LatentDiffusion, g.VQEma, g.GAN, g.GradientPenalty)),
            Entry(g.DDPM, data.NOISED, TWO_RANKS, NOISE),
            Entry(g.VQDataInit, data.NOISED, MICRO, OWN_STATE),
        ],
    ),
    Field(
        "Sequences",
        [
            *(Entry(m, data.LINES, cuts=True) for m in (q.TiedLanguageModel, q.PromptTuning)),
            *(Entry(m, data.LINES) for m in (q.Checkpointed, q.MixtureOfExperts, q.TBPTT)),
            Entry(q.SpeechCTC, data.SPEECH),
            Entry(q.Word2Vec, data.PAIRS, is_clipped=False),
            Entry(q.PaddedLanguageModel, data.SENTENCES, MICRO, OWN_BATCH),
            Entry(q.Stateful, data.LINES, TWO_RANKS, OWN_PYTHON, resumes=False),
        ],
    ),
    Field(
        "Structured data and control",
        [
            Entry(t.GraphNetwork, data.GRAPHS),
            Entry(t.ForceField, data.MOLECULES),
            Entry(t.MAML, data.TASKS),
            Entry(t.Snapshot, data.IMAGES),
            Entry(t.DQN, data.TRANSITIONS),
            Entry(t.Detection, data.SCENES, MICRO, OWN_BATCH),
        ],
    ),
    Field(
        "Optimization and logging",
        [
            *(Entry(m, data.IMAGES) for m in _PLAIN),
            Entry(o.LBFGS, data.IMAGES, is_clipped=False),
            Entry(o.BatchNorm, data.IMAGES, TWO_RANKS, "a batch norm has the statistics of the device's own batch"),
        ],
    ),
]
CATALOGUE = {entry.name: entry for one in FIELDS for entry in one.entries}
