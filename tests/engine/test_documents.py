"""The documents name what is there: links, files, modules, packages, choices, commands; in Chinese, too."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from lightswitch.config.overrides import GROUPS
from tests.engine.config.mistaken import answers, refused
from tests.engine.conftest import CHECKOUT
from tests.engine.tables.documents import MEASURED
from tests.engine.tables.reference import NAMES
from tests.engine.test_layout import PACKAGES

DOCS, ENGINE = CHECKOUT / "docs", CHECKOUT / "src" / "lightswitch"
MADE = (*NAMES, *(path.stem for path in MEASURED.glob("*.md")))
GENERATED = {DOCS / "reference" / f"{name}.md" for name in MADE}  # by `make docs`; git does not keep them
REFERENCE = sorted({*(DOCS / "reference").glob("*.md")} - GENERATED)
WRITTEN = [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("zh/*.md"))]
DOCUMENTS = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *WRITTEN]
README, RUNNING = (path.read_text() for path in (CHECKOUT / "README.md", DOCS / "running.md"))
MOST_PAGES, MOST_LINES, MOST_LINES_OF_A_PAGE = 18, 4500, 450
ROOTS = (CHECKOUT, CHECKOUT / "src", ENGINE, DOCS, CHECKOUT / "tests" / "engine")
PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|yaml|sh|toml|json|md|yml)|(?:[\w-]+/)+")
# Of a run, or of the reader's own
ELSEWHERE = re.compile(
    r"runs/|checkpoints/$|checkpoints_1/|crash/|\.?tensorboard/|\.?hydra/|\.submitit/|predictions/|src/project/|my/|"
    r"exports/|[\w.-]+@|slurm/site\.sh|NVIDIA/|optimization_results"
)
MEASURED = re.compile(r"<!-- (gpu|benchmarks) -->.*?<!-- end of \1 -->", re.DOTALL)  # what a command fills in
FENCED = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)


def _prose(path: Path) -> str:
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def test_every_file_and_module_that_a_document_names_is_there() -> None:
    codes = [(path, word) for path in DOCUMENTS for code in _codes(_prose(path)) for word in code.split()]
    named = {(path, word) for path, word in codes if PATH.fullmatch(word) and not ELSEWHERE.match(word)}
    assert len(named) > 30
    assert {(path, name) for path, name in named if not any((root / name).exists() for root in ROOTS)} == set()
    for name in re.findall(r"`(?:python -m )?lightswitch\.([\w.]+)[`(]", "\n".join(map(Path.read_text, DOCUMENTS))):
        module = ENGINE.joinpath(*name.split("."))  # or a class or function of the one above
        assert any(place.is_dir() or place.with_suffix(".py").exists() for place in (module, module.parent)), name


def _codes(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def test_every_link_leads_somewhere_and_every_page_is_found_from_the_first() -> None:
    for path in (*DOCUMENTS, *REFERENCE):
        for file, heading in re.findall(r"\]\((?!\w+:)([^)\s#]*)#?([^)\s]*)\)", _prose(path)):
            target = (path.parent / file).resolve() if file else path
            assert target in GENERATED or target.exists(), f"{path}: {file}"
            assert not heading or target in GENERATED or heading in _anchors(target), f"{path}: {file}#{heading}"
    pages = {path.relative_to(CHECKOUT).as_posix() for path in {*DOCS.rglob("*.md")} - GENERATED}
    assert pages - {*re.findall(r"\]\((docs/[^)#]+)", README)} == {"docs/index.md"}


def _anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", _prose(path), re.MULTILINE)
    kept = ("".join(c for c in text.lower() if c in " -_" or unicodedata.category(c)[0] in "LN") for text in headings)
    return {text.replace(" ", "-") for text in kept}


def test_the_pages_that_are_written_by_hand_stay_few_and_short() -> None:
    by_hand = {path.name: MEASURED.sub("", path.read_text()) for path in WRITTEN if path.name != "index.md"}
    lines = {name: len(text.splitlines()) for name, text in by_hand.items()}
    assert len(lines) <= MOST_PAGES
    assert sum(lines.values()) <= MOST_LINES
    assert {name for name, count in lines.items() if count > MOST_LINES_OF_A_PAGE} == set()
    assert len(README.splitlines()) <= 90
    assert len(README.partition("\n## ")[0].splitlines()) <= 30  # the first screen


def test_the_architecture_has_the_packages_and_says_where_to_look() -> None:
    text = (DOCS / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)(?:\.py)?` \| \S", text, re.MULTILINE)
    assert [row for row in rows if row in PACKAGES] == [*PACKAGES]
    places = re.findall(r"\(\.\./(src/\S+\.py)\)[,;]? `(\w+)`", text)
    assert [
        (file, name) for file, name in places if not re.search(rf"(def|class) {name}\b", (CHECKOUT / file).read_text())
    ] == []


# What only the page itself makes, or the reader has; flags; sweeps; a host; a choice without what it needs
OF_THE_READER = re.compile(
    r"…|<|my\.|(^|\s)-|\b(mlp|stripes|listener|calls|mine|resnet|table|jsonl|all_reduce|HEAD)\b|gpt_search|=ddp,|=hf_text$"
)
A_CHOICE = re.compile(rf"({'|'.join(GROUPS)})=[\w\[]")


def _typed(path: Path) -> Iterator[str]:
    """What a page says to type after `python train.py`, and what begins with a choice."""
    text = re.sub(r" *\\\n +", " ", path.read_text())
    lines = re.findall(r"^    (?:\$ )?python train\.py (.+)$(?!\n    error:)", text, re.MULTILINE)
    passing = re.findall(r"`(?:python train\.py )?([a-z]\w+=[^`\n]+)`", text)
    yield from (line for line in (*lines, *filter(A_CHOICE.match, passing)) if not OF_THE_READER.search(line))


def test_what_the_pages_say_to_type_is_taken_and_mistakes_are_answered_as_they_show(tmp_path: Path) -> None:
    elsewhere = ("your-own-code.md", "fork.md", "extension.md")  # which have tests of their own
    pages = [path for path in DOCUMENTS if path.name not in elsewhere]
    typed = dict.fromkeys(line for page in pages for line in _typed(page))
    assert len(typed) >= 40
    assert refused(map(shlex.split, typed), tmp_path) == {}
    errors = re.findall(r"^    \$ python (train\.py .*)\n    (error: .*)$", RUNNING, re.MULTILINE)
    assert len(errors) == 3
    (tmp_path / "mistakes").mkdir()
    found = answers({command: shlex.split(command)[1:] for command, _ in errors}, tmp_path / "mistakes")
    assert [(command, found[command].err.strip(), found[command].returncode) for command, _ in errors] == [
        (*error, 2) for error in errors
    ]


def _lines_of_code(text: str) -> list[str]:
    return re.findall(r"^    +(\S.*)$", FENCED.sub("", text), re.MULTILINE)
