"""The documents name what is there: files, links, packages."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from tests.engine.conftest import CHECKOUT

ENGINE = CHECKOUT / "src" / "lightswitch"
DOCUMENTS = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
DOCUMENTS += sorted((CHECKOUT / "docs" / "zh").glob("*.md"))
REFERENCE = sorted((CHECKOUT / "docs" / "reference").glob("*.md"))  # made by tests/engine/tables
MOST_PAGES, MOST_LINES, MOST_LINES_OF_A_PAGE = 18, 4500, 450
ROOTS = (CHECKOUT, CHECKOUT / "src", ENGINE, CHECKOUT / "docs", CHECKOUT / "tests" / "engine")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|yaml|sh|toml|json|md|yml)|(?:[\w-]+/)+")
# Of a run, or of the reader's own
ELSEWHERE = re.compile(
    r"runs/|checkpoints/$|checkpoints_1/|crash/|\.?tensorboard/|\.?hydra/|\.submitit/|predictions/|src/project/|my/|"
    r"exports/|[\w.-]+@|slurm/site\.sh|NVIDIA/|optimization_results"
)


def _prose(path: Path) -> str:
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def _named_paths(path: Path) -> Iterator[str]:
    for code in CODE.findall(_prose(path)):
        for word in code.split():
            if PATH.fullmatch(word) and not ELSEWHERE.match(word):
                yield word


def test_every_file_that_a_document_names_is_there() -> None:
    named = {(path, name) for path in DOCUMENTS for name in _named_paths(path)}
    assert {(path, name) for path, name in named if not any((root / name).exists() for root in ROOTS)} == set()


def test_the_names_of_files_are_found_in_the_documents() -> None:
    assert sum(len(list(_named_paths(path))) for path in DOCUMENTS) > 30


def test_every_link_leads_somewhere() -> None:
    links = [(path, link) for path in (*DOCUMENTS, *REFERENCE) for link in re.findall(r"\]\(([^)\s]+)\)", _prose(path))]
    for path, link in links:
        if re.match(r"\w+:", link):
            continue
        file, _, heading = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if heading:
            assert heading in _anchors(target), link


def _anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", _prose(path), re.MULTILINE)
    kept = ("".join(c for c in text.lower() if c in " -_" or unicodedata.category(c)[0] in "LN") for text in headings)
    return {text.replace(" ", "-") for text in kept}


def test_the_pages_that_are_written_by_hand_stay_few_and_short() -> None:
    folder = CHECKOUT / "docs"
    pages = {*folder.rglob("*.md")} - {*REFERENCE, folder / "index.md"}
    lines = {page.name: len(page.read_text().splitlines()) for page in pages}
    assert len(lines) <= MOST_PAGES
    assert sum(lines.values()) <= MOST_LINES
    assert {name for name, count in lines.items() if count > MOST_LINES_OF_A_PAGE} == set()


def test_every_package_has_its_row_in_the_architecture() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| \S", (CHECKOUT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    packages = {path.parent.name for path in ENGINE.glob("*/__init__.py")}
    modules = {path.name for path in ENGINE.glob("*.py") if path.name != "__init__.py"}
    assert packages | modules <= set(rows)


def test_rows_of_the_architecture_point_down_as_the_layout_has_it() -> None:
    from tests.engine.test_layout import PACKAGES

    rows = re.findall(r"^\| `([\w.]+)` \| \S", (CHECKOUT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    packages = [row.removesuffix(".py") for row in rows if row.removesuffix(".py") in PACKAGES]
    assert packages == sorted(packages, key=PACKAGES.index)


def test_nobody_needs_more_than_two_files_to_find_what_architecture_lists() -> None:
    text = (CHECKOUT / "docs" / "architecture.md").read_text()
    _, _, section = text.partition("## Where do I look for…\n")
    rows = re.findall(r"^\| (?!---)(.+?) \| (.+) \|$", section.partition("\n## ")[0], re.MULTILINE)[1:]
    assert len(rows) >= 10
    for _, files in rows:
        assert files.count("](") <= 2, files
        for file, name in re.findall(r"\(\.\./(src/\S+\.py)\)(?:[,;]? `(\w+)`)?", files):
            assert not name or f"def {name}" in (CHECKOUT / file).read_text(), name


def test_the_package_is_typed_for_those_who_install_it() -> None:
    assert (ENGINE / "py.typed").exists()
    assert '"py.typed"' in (CHECKOUT / "pyproject.toml").read_text()


def test_every_module_that_a_document_names_is_there() -> None:
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    for name in re.findall(r"`(?:python -m )?(lightswitch(?:\.\w+)+)[`(]", text):
        module = CHECKOUT.joinpath("src", *name.split("."))
        owner = module.parent  # of a class or function
        assert any(place.is_dir() or place.with_suffix(".py").exists() for place in (module, owner)), name


# A docstring names the thing or begins with a verb, for one who has not read the file.
LINES_WITHOUT_DOCSTRING = 8
FRAGMENT = re.compile(
    r"(?:Of|As|Until|For|Where|When|While|Whether|With|Without|Before|After|In|On|At|By|To|From|Under|Over|Also|Not|Unless|"
    r"Those|These|It|Its|They|Their|Once|Whose|Who|None|Nothing|Here|There|How|Why|What|Which|That|Args|Raises|Returns)\b"
)
# Called by Lightning, torch or pickle, which say what they are for
HOOK = re.compile(
    r"(on|set_up|configure|lookup|commit|load|read|write|find)_\w+|setup\w*|teardown|forward|finish|experiment|name|version|"
    r"(train|validat|test|predict|optimizer|training)\w*_step|post_backward|block_backward_sync|convert_\w+|log_\w+"
)


def _definitions(node: ast.AST, inherits: bool = False) -> Iterator[tuple[ast.FunctionDef | ast.ClassDef, bool]]:
    """Every class, function and method, and whether it is one of a class that has bases."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child, inherits
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, bool(child.bases))


def _needs_docstring(node: ast.FunctionDef | ast.ClassDef, inherits: bool) -> bool:
    lines = (node.end_lineno or 0) - node.lineno + 1
    is_hook = isinstance(node, ast.FunctionDef) and inherits and HOOK.fullmatch(node.name)
    return lines > LINES_WITHOUT_DOCSTRING and not node.name.startswith("_") and not is_hook


def test_docstrings_are_sentences_or_names() -> None:
    unclear = [
        f"{path.relative_to(ENGINE)}: {told}" for path in sorted(ENGINE.rglob("*.py")) for told in _unclear(path)
    ]
    assert unclear == []


def _unclear(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    if not re.match("[A-Z`]|[a-z.]+[:,]|torch|metrics", ast.get_docstring(tree) or ""):
        yield "the file's own"
    for node, inherits in _definitions(tree):
        told = ast.get_docstring(node)
        is_property = bool(node.decorator_list) and node.name.lstrip("_").startswith("is_")
        is_fragment = told and FRAGMENT.match(told) and not (is_property and told.startswith("Whether"))
        if (told and not re.match("[A-Z]", told)) or is_fragment or (not told and _needs_docstring(node, inherits)):
            yield f"{node.name}: {told or 'none'}"
