"""The documents name what is there: links, files, modules, packages, choices, commands; in Chinese, too."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightswitch.config.overrides import GROUPS
from tests.engine.config.mistaken import answers, refused
from tests.engine.conftest import CHECKOUT
from tests.engine.test_layout import PACKAGES

DOCS, ENGINE = CHECKOUT / "docs", CHECKOUT / "src" / "lightswitch"
README, CHANGELOG = CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md"
WRITTEN = [path for path in sorted(DOCS.glob("*.md")) if path.name != "index.md"]
CHINESE = sorted(DOCS.glob("zh-*/*.md"))
MEASURED = sorted((CHECKOUT / "tests" / "engine" / "tables" / "measured").glob("*.md"))
DOCUMENTS = [README, CHECKOUT / "CONTRIBUTING.md", *WRITTEN]
MOST_PAGES, MOST_WORDS = 12, 2000  # of pages that are written by hand; words of each
ROOTS = (CHECKOUT, CHECKOUT / "src", ENGINE, DOCS, CHECKOUT / "tests" / "engine")
PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|yaml|sh|toml|json|md|yml)|(?:[\w-]+/)+")
# Of a run, of a project, or of the reader's own
ELSEWHERE = re.compile(
    r"runs/|checkpoints/$|crash/|\.?tensorboard/|\.?hydra/|predictions/|wheels/|src/(project|birdsong)/|exports/|"
    r"[\w.-]+@|slurm/site\.sh|\.vscode/schemas/"
)
FENCED = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)
HOUSE = re.compile(r"<!-- house -->.*<!-- end of house -->", re.DOTALL)  # a table that a command fills in


def _prose(path: Path) -> str:
    return FENCED.sub("", path.read_text())


def test_every_file_and_module_that_a_document_names_is_there() -> None:
    codes = [(path, word) for path in DOCUMENTS for code in _codes(_prose(path)) for word in code.split()]
    named = {(path, word) for path, word in codes if PATH.fullmatch(word) and not ELSEWHERE.match(word)}
    assert len(named) > 20
    assert {(path, name) for path, name in named if not any((root / name).exists() for root in ROOTS)} == set()
    for name in re.findall(r"`(?:python -m )?lightswitch\.([\w.]+)[`(]", "\n".join(map(Path.read_text, DOCUMENTS))):
        module = ENGINE.joinpath(*name.split("."))  # or a class or function of the one above
        assert any(place.is_dir() or place.with_suffix(".py").exists() for place in (module, module.parent)), name


def _codes(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def test_every_link_leads_somewhere_and_every_page_is_found_from_the_first() -> None:
    for path in (*DOCUMENTS, *CHINESE, *MEASURED, CHANGELOG, CHECKOUT / "AGENTS.md", CHECKOUT / "SECURITY.md"):
        for file, heading in re.findall(r"\]\((?!\w+:)([^)\s#]*)#?([^)\s]*)\)", _prose(path)):
            target = (path.parent / file).resolve() if file else path
            assert target.exists(), f"{path}: {file}"
            assert not heading or heading in _anchors(target), f"{path}: {file}#{heading}"
    linked = {*re.findall(r"\]\((docs/[^)#]+)", README.read_text())}
    assert {path.relative_to(CHECKOUT).as_posix() for path in WRITTEN} <= linked
    site = (CHECKOUT / "mkdocs.yml").read_text()  # make docs refuses a page that its menu lacks
    assert [
        path.name for path in (*WRITTEN, *MEASURED) if not re.search(rf"[ /]{path.name}$", site, re.MULTILINE)
    ] == []


def _anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", _prose(path), re.MULTILINE)
    kept = ("".join(c for c in text.lower() if c in " -_" or unicodedata.category(c)[0] in "LN") for text in headings)
    return {text.replace(" ", "-") for text in kept}


def test_the_pages_that_are_written_by_hand_stay_few_and_short() -> None:
    words = {path.name: len(HOUSE.sub("", path.read_text()).split()) for path in WRITTEN}
    assert len(words) <= MOST_PAGES
    assert {name: count for name, count in words.items() if count > MOST_WORDS} == {}
    assert len(README.read_text().splitlines()) <= 90


def test_the_architecture_has_the_packages_and_says_where_to_look() -> None:
    text = (DOCS / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| \S", text, re.MULTILINE)
    assert [row for row in rows if row in PACKAGES] == [*PACKAGES], "run python -m tests.engine.tables.house"
    places = re.findall(r"\(\.\./(src/\S+\.py)\),? `(\w+)`", text)
    assert len(places) >= 8
    assert [
        (file, name) for file, name in places if not re.search(rf"(def|class) {name}\b", (CHECKOUT / file).read_text())
    ] == []


# What only the page itself makes, or the reader has; flags; sweeps; a host; a choice without what it needs
OF_THE_READER = re.compile(
    r"…|<|my\.|(^|\s)-|\b(mlp|stripes|mine|loss_limit|jsonl|bf16-training|all_reduce|HEAD|FOLDER|NAME|PATH)\b|=ddp,|"
    r"=hf_text$|\b(gpt_search|one|two|again)\b"
)
A_CHOICE = re.compile(rf"({'|'.join(GROUPS)})=[\w\[]")


def _typed(path: Path) -> Iterator[str]:
    """What a page says to type after `python train.py`, and what begins with a choice."""
    lines = re.findall(r"^    (?:\$ )?python train\.py (.+)$(?!\n    error:)", path.read_text(), re.MULTILINE)
    passing = re.findall(r"`(?:python train\.py )?([a-z]\w+=[^`\n]+)`", path.read_text())
    yield from (line for line in (*lines, *filter(A_CHOICE.match, passing)) if not OF_THE_READER.search(line))


def test_what_the_pages_say_to_type_is_taken_and_mistakes_are_answered_as_they_show(tmp_path: Path) -> None:
    pages = [page for page in DOCUMENTS if page.name != "coming-from-elsewhere.md"]  # which has a test of its own
    typed = dict.fromkeys(line for page in pages for line in _typed(page))
    assert len(typed) >= 40
    assert refused(map(shlex.split, typed), tmp_path) == {}
    start = (DOCS / "start.md").read_text()
    errors = re.findall(r"^    \$ python (train\.py .*)\n    (error: .*)$", start, re.MULTILINE)
    assert len(errors) == 3
    (tmp_path / "mistakes").mkdir()
    found = answers({command: shlex.split(command)[1:] for command, _ in errors}, tmp_path / "mistakes")
    assert [(command, found[command].err.strip(), found[command].returncode) for command, _ in errors] == [
        (*error, 2) for error in errors
    ]


# The commands of README and the three first pages: each is typed, as it stands or shortened, by a test

TYPED_BY = {  # a command: the file of that test, and what is found there
    r"python train\.py(?!.*--)(?! mode=check| -m)": (
        "test_guides.py",
        "def test_the_commands_of_the_first_pages_train",
    ),
    r"python train\.py mode=check": ("checking/test_check.py", '"mode=check"'),
    r"python train\.py (?:\S+ )?--cfg": ("test_guides.py", '"--cfg" in words'),
    r"python train\.py --help": ("reference/test_reference.py", '"--help optimizer=sgd"'),
    r"python train\.py -m ": ("sweeps/test_sweeps.py", '"-m"'),
    r"python -m (lightswitch\.compare) ": ("test_guides.py", None),
    r"python -m (lightswitch\.export) ": ("export/test_export.py", None),
    r"(?:srun .*)?python -m (lightswitch\.doctor)": ("doctor/test_doctor.py", None),
    r"python -m (lightswitch\.patches)": ("../nightly/test_checkout.py", "pages()"),
    r"python -m (project\.data\.pack) ": ("../project/examples/test_text_shards.py", None),
    r"make (train|test)$": ("../nightly/fork/test_forks.py", '"make {}'),
    r"(nohup) python": ("sweeps/test_sweeps.py", "that_{}_started"),
    r"(source \.venv/bin/activate)": ("../nightly/fork/test_forks.py", None),
    r"uvx .* (lightswitch-fork) ": ("../nightly/fork/test_forks.py", None),
    r"make (?:train WHEELHOUSE=)?(wheelhouse)": ("../nightly/slurm/test_without_internet.py", None),
    r"make docs": ("../nightly/test_checkout.py", '"mkdocs", "build"'),
    r"sbatch .*slurm/(multinode\.sh)": ("slurm/test_nodes.py", None),
    r"sbatch .*slurm/(single\.sh|sweep\.sh|torchrun\.sh)": ("slurm/sites.yaml", None),
    r"(srun) .* train\.py": ("slurm/test_nodes.py", '"{}", "--nodes=2"'),
    r"(scancel) ": ("slurm/test_preemption.py", '"{}"'),
    r"torchrun (--standalone)|torchrun .*(--node-rank)": ("launch/test_launchers.py", None),
    r"torchrun .*(--nnodes)=2:4|export (TORCH_DISABLE_SHARE_RDZV_TCP_STORE)": ("elastic/agents.py", None),
    r"MASTER_ADDR=.*(NODE_RANK|WORLD_SIZE)": ("launch/test_launchers.py", None),
}
NOT_TYPED = r"PIP_EXTRA_INDEX_URL|pip install|uv sync|make train EXTRAS|export NCCL_"  # from an index; of a network
A_COMMAND = re.compile(r"(python|make|source|export|torchrun|sbatch|srun|scancel|uvx|pip|nohup|[A-Z_]+=\S+) \S")


def test_each_command_of_the_first_pages_is_typed_by_a_test() -> None:
    texts = [path.read_text() for path in (README, *(DOCS / name for name in TRANSLATED if name != "readme.md"))]
    lines = [line for text in texts for line in (*_lines_of_code(text), *_codes(FENCED.sub("", text)))]
    commands = {line.removeprefix("$ ") for line in lines if A_COMMAND.match(line.removeprefix("$ "))}
    assert len(commands) > 50
    for command in commands:
        if not re.match(NOT_TYPED, command):
            file, words = _typed_by(command)
            assert words in (CHECKOUT / "tests" / "engine" / file).read_text(), command


def _typed_by(command: str) -> tuple[str, str]:
    for pattern, (file, words) in TYPED_BY.items():
        if found := re.match(pattern, command):
            names = [name for name in found.groups() if name]
            return file, (words or "{}").format(*names)
    raise AssertionError(f"{command}: no test types it")


# Chinese: README and the three first pages, in traditional and in simplified characters

TRANSLATED = {
    "readme.md": README,
    **{name: DOCS / name for name in ("start.md", "your-model-and-data.md", "scale-out.md")},
}


@pytest.mark.parametrize("language", ["zh-Hant", "zh-Hans"])
@pytest.mark.parametrize("name", TRANSLATED)
def test_a_chinese_page_has_the_headings_commands_code_and_tables_of_the_english_one(language: str, name: str) -> None:
    chinese, english = (DOCS / language / name).read_text(), TRANSLATED[name].read_text()
    for part in (_headings, _lines_of_code, FENCED.findall, _rows, _names):
        assert part(chinese) == part(english), part


def _headings(text: str) -> list[str]:
    return re.findall(r"^#+ ", FENCED.sub("", text), re.MULTILINE)


def _lines_of_code(text: str) -> list[str]:
    """Return the indented lines, without the comments at their ends."""
    lines = re.findall(r"^    +(\S.*)$", FENCED.sub("", text), re.MULTILINE)
    return [re.sub(r"\s+#.*|\s{2,}\S.*", "", line) for line in lines]


def _rows(text: str) -> list[int]:
    """Return the number of cells of each row of its tables."""
    return [line.count(" | ") for line in re.findall(r"^\| .*$", FENCED.sub("", text), re.MULTILINE)]


def _names(text: str) -> set[str]:
    return {*_codes(FENCED.sub("", text))}
