"""The code for networks in docs/your-own-code.md and for tables in docs/data.md, as it stands there, in real runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import CHECKOUT, Finished, Train
from tests.engine.curves import largest_difference

SECTIONS = {"your-own-code.md": "A network of torchvision or timm", "data.md": "A CSV or Parquet file"}


def _section(page: str, heading: str) -> str:
    _, _, rest = (CHECKOUT / "docs" / page).read_text().partition(f"\n## {heading}\n")
    return re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]


TEXT = "".join(_section(*section) for section in SECTIONS.items())
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", TEXT, re.DOTALL))
NETWORK = """
from torch import nn

def layers(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, num_classes))
"""


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    """The pages' files under another package's name than `project`; a network and a table of two columns."""
    folder = tmp_path / "fork"
    for path, text in FILES.items():
        file = folder / path.replace("src/project/", "images_page/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("project.", "images_page."))
    (folder / "images_page" / "layers.py").write_text(NETWORK)
    rows = np.random.default_rng(0).normal(5, 2, (400, 2))
    table = np.column_stack([rows, rows[:, 0] > rows[:, 1]])
    np.savetxt(folder / "flowers.csv", table, delimiter=",", header="petal,leaf,kind", comments="")
    return (
        *("model=resnet", "data=table", "--config-dir", str(folder / "conf")),
        *("data.file=flowers.csv", "data.label=kind", "data.classes=2", "optimizer.lr=0.02"),
        *("model.network._target_=images_page.layers.layers", "trainer.max_steps=40", "trainer.log_every_n_steps=1"),
        *("trainer.val_check_interval=40", "trainer.accelerator=cpu"),
    )


def test_the_sections_name_a_file_for_each_block_of_code() -> None:
    assert len(FILES) == len(re.findall("```", TEXT)) / 2 == 4


def test_its_network_learns_its_table_as_well_over_two_devices(
    words: tuple[str, ...], train: Train, tmp_path: Path
) -> None:
    folder = tmp_path / "fork"
    train(*words, "run_id=one", "strategy=single", folder=folder)
    out = train(*words, "run_id=two", "strategy=fsdp", ranks=2, folder=folder).out
    one, two = (Finished(0, "", "", folder, name) for name in ("one", "two"))
    assert largest_difference(two, one) < 1e-5
    assert float(re.findall(r"test/accuracy +([\d.]+)", out)[-1]) > 0.9


def test_its_table_is_read_alike_from_parquet(words: tuple[str, ...], tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow.csv")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "fork" / "flowers.csv"
    parquet.write_table(pyarrow.read_csv(file), file.with_suffix(".parquet"))
    page = runpy.run_path(str(tmp_path / "fork" / "images_page" / "data" / "table.py"))
    from_csv, from_parquet = (page["read"](file.with_suffix(end)) for end in (".csv", ".parquet"))
    assert list(from_csv) == list(from_parquet) == ["petal", "leaf", "kind"]
    assert all(np.array_equal(from_csv[name], from_parquet[name]) for name in from_csv)
