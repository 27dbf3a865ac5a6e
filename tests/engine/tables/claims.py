"""The numbers that documents tell of a run or a machine: where each stands, and what shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.engine.conftest import CHECKOUT


@dataclass(frozen=True)
class Claim:
    """A number in a document.

    Args:
        document: its path in the checkout.
        quote: a pattern of its words, which the page takes from the document as they stand there.
        shown_by: the test that holds it, or the command that measured it; empty where none was kept.
        date: of the measurement; a pattern, where the document itself has it. Empty of what a test holds.
    """

    document: str
    quote: str
    shown_by: str
    date: str = ""

    @property
    def words(self) -> str:
        """The words as they stand in the document.

        Raises:
            AssertionError: it does not have them.
        """
        return _found(self.quote, " ".join(self.text.split()))

    @property
    def day(self) -> str:
        """The date of the measurement."""
        return _found(self.date, self.text) if "(" in self.date else self.date

    @property
    def text(self) -> str:
        """The document's."""
        return (CHECKOUT / self.document).read_text()


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match[match.re.groups and 1]


HELD = (
    Claim("README.md", r"to 1e-5 over 50 steps", "tests/engine/test_same_run.py"),
    Claim("docs/planning.md", r"within 1 %", "tests/engine/planning/test_truth.py"),
    Claim(
        "docs/checkpoints.md",
        r"every loss is that of the uninterrupted run to the bit",
        "tests/engine/checkpoints/test_killed.py",
    ),
    Claim(
        "docs/checkpoints.md", r"damages a thousand checkpoints at random", "tests/engine/checkpoints/test_fuzzed.py"
    ),
    Claim("docs/strategies.md", r"\d+ shapes under \d+ strategies", "tests/engine/strategies/test_module_shapes.py"),
    Claim("docs/export.md", r"\d+ MB of weights .* eight numbers do", "tests/engine/export/test_export.py"),
    Claim("docs/security.md", r"4096 ranks join at once", "tests/engine/fault_tolerance/watchdog/test_hub.py"),
    Claim("docs/tutorial.md", r"val/right \d\.\d+", "tests/nightly/test_tutorial.py"),
)
_TRAIN = "python train.py model=listener data=calls trainer.max_steps=250 run_id=first"
_COMPLETE = "python -m lightswitch.reference.completion 'python train.py optimizer=sgd optimizer.'"
_COMPARE = "python -m lightswitch.compare runs/gpt/single runs/gpt/four"
_CLOCK = r"{}/(\d{{4}}-\d\d-\d\d)"  # of a run's id, in what it printed
_PLAN = "mode=plan model=gpt2_large data=text data.files=[CHANGELOG.md] precision=bf16-mixed trainer.devices=8"
MEASURED = (
    Claim("README.md", r"seconds in all \d:\d\d", "make train", _CLOCK.format("gpt")),
    Claim("README.md", r"val/loss \d\.\d+ · val/perplexity \d\.\d+", "make train", _CLOCK.format("gpt")),
    Claim("docs/running.md", r"bigram entropy is \d\.\d+ nats a character", "", "2026-11-21"),
    Claim("docs/tutorial.md", r"seconds in all \d:\d\d", _TRAIN, "2026-11-22"),
    Claim("docs/tutorial.md", r"sets up `\.venv`, which takes about two minutes", "make train", "2026-11-22"),
    Claim(
        "docs/planning.md",
        r"take \w+, micro batch \d+: .*? device-hours",
        f"python train.py {_PLAN} plan.device=rtx_4090",
        _CLOCK.format("gpt2_large"),
    ),
    Claim(
        "docs/planning.md",
        r"`gpt_7b` on 32 devices[^.]*: they take less than a GiB of memory",
        "python -m benchmarks.plan",
        "2026-11-22",
    ),
    Claim("docs/planning.md", r"763 MiB in 32 bits", "", "2026-11-22"),
    Claim("docs/dry-run.md", r"The run above takes [^,.]*", "python train.py mode=dry_run", "2026-11-22"),
    Claim("docs/comparison.md", r"deepspeed_stage_2 is the fastest: [\d.]+k tokens a second", _COMPARE, "2026-11-22"),
    Claim("docs/comparison.md", r"ten to twenty percent", "", "2026-11-22"),
    Claim("docs/editors.md", r"an eighth of a second of CPU time", _COMPLETE, "2026-11-22"),
    Claim("docs/add.md", r"eight to sixteen times faster", "python -m benchmarks.data", "2026-11-21"),
    Claim(
        "docs/strategies.md",
        r"the strategy, and the GiB that it takes of a device",
        "python -m tests.engine.tables.guide",
        "2026-11-22",
    ),
    Claim(
        "docs/doctor.md", r"gloo, 8 bytes: \d+ µs", "torchrun --nproc-per-node=2 -m lightswitch.doctor", "2026-11-22"
    ),
    Claim("docs/speed.md", r"0\.65 ms in place of 1\.69", "", "2026-11-22"),
    Claim("docs/speed.md", r"gains 2 % by blocks and 7 % as a whole", "", "2026-11-23"),
    Claim("docs/speed.md", r"2 s of CPU and more", "python -c 'import lightning.pytorch'", "2026-11-22"),
    Claim("docs/speed.md", r"`self\.log` takes about 400 µs a call", "", "2026-11-21"),
    Claim("docs/speed.md", r"about 120 remain", "", "2026-11-22"),
    Claim("docs/speed.md", r"for the samples and for the step, are 30 µs", "", "2026-11-22"),
    Claim(
        "docs/speed.md",
        r"the MLP's ratio to plain PyTorch was .*? to \d\.\d\.",
        "python -m benchmarks.step",
        "2026-11-22",
    ),
    Claim("docs/speed.md", r"a step of the MLP that is not logged \| calls of functions", "", "2026-11-22"),
    Claim(
        "docs/streams.md",
        r"one device \(CPU time\) \| [\d.]+ \| [\d.]+ \| [\d.]+",
        "python -m benchmarks.streams",
        "2026-11-22",
    ),
    Claim("docs/text.md", r"\d\.\d\d of the speed", "python -m benchmarks.shards --gib 10", "2026-11-22"),
    Claim("docs/fork.md", r"less than three minutes on two cores", "make test", "2026-11-22"),
    Claim("docs/fork.md", r"a quarter of an hour on two cores", "make test", "2026-11-23"),
)
