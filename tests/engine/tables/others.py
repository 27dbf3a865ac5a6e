"""The comparison with other projects, made from others.yaml.

python -m tests.engine.tables.others
"""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.engine.conftest import CHECKOUT
from tests.engine.tables.documents import table

LIST = Path(__file__).with_suffix(".yaml")
PAGE = CHECKOUT / "docs" / "comparison-with-others.md"
TAKE = {
    "the fastest code for pretraining Llama-like models, with pipeline and context parallelism": "torchtitan",
    "a training loop that you read in an afternoon": "nanoGPT, nanochat",
    "recipes for fine-tuning many pretrained models": "transformers' Trainer, TRL, axolotl, litgpt",
    "a Hydra template with a large community": "lightning-hydra-template",
    "your loop in your hands, and only the launch from a library": "accelerate",
    "one run that does not change with the strategy, resumes under another, and refuses what would change it": (
        "lightswitch"
    ),
}


def text() -> str:
    rows = yaml.safe_load(LIST.read_text())
    shown = [(row["feature"], row["here"], f"{row['peer']}: {row['file']}", row["better"]) for row in rows]
    return (
        "\n\n".join(
            (
                "# Comparison with others",
                table(("you want", "take"), TAKE.items()),
                "## Feature by feature",
                "*There* is the project that does it best, with the file to look at. The others were read in November "
                "2026 as their code stood; nothing of theirs was measured. The page is made from the list "
                "[others.yaml](../tests/engine/tables/others.yaml), by `python -m tests.engine.tables.others`.",
                table(("feature", "here", "there", "better"), shown),
            )
        )
        + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(text())
