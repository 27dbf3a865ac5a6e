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
    *(o.Classifier, o.StepsCounted, o.SpectralNorm, o.WeightNorm, o.Distillation, o.MultiTask, o.Sharpness),
    *(o.AccumulatesByHand, o.TwoBackward, o.MaxNorm, o.OneCycle, o.WarmRestarts, o.Plateau),
    *(o.Warmup, o.Averaged, o.GradientHooks, o.SkipsBatches, o.StepsByHand, o.LogsOfEveryKind, o.ShowsPictures),
    *(o.ArcFace, o.ScheduleFree),
)
FIELDS = [
    Field(
        "Self-supervised vision",
        [
            *(Entry(m, data.VIEWS) for m in (s.MoCo, s.BYOL, s.DINO, s.GatheredSimCLR, s.CLIP, s.SimSiam, s.SwAV)),
            Entry(s.KNNMonitor, data.VIEWS, TWO_RANKS, "it evaluates on the device's own samples"),
            *(Entry(m, data.VIEWS, MICRO, OWN_BATCH) for m in (s.SimCLR, s.VICReg)),
            Entry(s.MemoryBank, data.VIEWS, TWO_RANKS, OWN_STATE),
            Entry(s.MaskedAutoencoder, data.VIEWS, TWO_RANKS, NOISE),
        ],
    ),
    Field(
        "Generative",
        [
            *(Entry(m, data.NOISED) for m in (g.LatentDiffusion, g.EmaCopy, g.VQEma, g.RealNVP)),
            *(Entry(m, data.NOISED) for m in (g.GAN, g.WGAN, g.GradientPenalty, g.ScoreMatching)),
            *(Entry(m, data.NOISED, TWO_RANKS, NOISE) for m in (g.DDPM, g.VAE)),
            *(Entry(m, data.NOISED, MICRO, OWN_STATE) for m in (g.VQDataInit, g.Glow)),
        ],
    ),
    Field(
        "Sequences",
        [
            *(Entry(m, data.LINES, cuts=True) for m in (q.TiedLanguageModel, q.PromptTuning)),
            *(Entry(m, data.LINES) for m in (q.Checkpointed, q.MixtureOfExperts, q.TBPTT, q.RecurrentCells)),
            Entry(q.SpeechCTC, data.SPEECH),
            Entry(q.TemporalFusion, data.SERIES),
            Entry(q.Word2Vec, data.PAIRS, is_clipped=False),
            Entry(q.PaddedLanguageModel, data.SENTENCES, MICRO, OWN_BATCH),
            Entry(q.LoadBalanced, data.LINES, MICRO, OWN_BATCH),
            Entry(q.Stateful, data.LINES, TWO_RANKS, OWN_PYTHON, resumes=False),
        ],
    ),
    Field(
        "Structured data and control",
        [
            Entry(t.GraphNetwork, data.GRAPHS),
            Entry(t.ForceField, data.MOLECULES),
            Entry(t.PhysicsInformed, data.POINTS),
            Entry(t.TwoTowers, data.TOWERS),
            Entry(t.MAML, data.TASKS),
            Entry(t.Snapshot, data.IMAGES),
            *(Entry(m, data.TRANSITIONS) for m in (t.DQN, t.DDPG)),
            Entry(t.Detection, data.SCENES, MICRO, OWN_BATCH),
            Entry(t.Dice, data.MASKS, MICRO, OWN_BATCH),
            Entry(t.Reinforce, data.TRANSITIONS, TWO_RANKS, OWN_PYTHON, resumes=False),
        ],
    ),
    Field(
        "Optimization and logging",
        [
            *(Entry(m, data.IMAGES) for m in _PLAIN),
            Entry(o.LBFGS, data.IMAGES, is_clipped=False),
            Entry(o.LooksAhead, data.IMAGES, because=OWN_PYTHON, resumes=False),
            Entry(o.BatchNorm, data.IMAGES, TWO_RANKS, "a batch norm has the statistics of the device's own batch"),
            Entry(o.Dropout, data.IMAGES, TWO_RANKS, NOISE),
            Entry(o.RunningNorm, data.IMAGES, TWO_RANKS, OWN_STATE),
        ],
    ),
]
CATALOGUE = {entry.name: entry for one in FIELDS for entry in one.entries}
