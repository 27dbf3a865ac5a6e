"""The files of a fork: those that it takes from the checkout, and how their text is changed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lightswitch.fork import engine, repository
from lightswitch.fork.repository import File

DOCUMENTS = "docs/lightswitch"
_FIRST, _OF_SITE = "README.md", "docs/index.md"  # the page that lists the others, and one that only includes it
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")

_AS_THEY_ARE = ("LICENSE", "constraints.txt")
_NOT_OF_A_FORK = (
    r"benchmarks|tests[./](?:engine|nightly)|lightswitch\.fork|docs/"  # a target of make that mentions one is left out
)
_LINT = """\
lint: $(INSTALLED) $(SCHEMAS) ## look for mistakes in the code; make lint STRICT=1 checks format, style and types, too
	$(PYTHON) -m ruff check $(if $(STRICT),,--select E9,F63,F7,F82) .
	$(if $(STRICT),$(PYTHON) -m ruff format --check .)
	$(if $(STRICT),$(PYTHON) -m mypy)
"""
_UPDATE_ENGINE = """\
update-engine: $(INSTALLED) ## update the engine, and run the tests: make update-engine FROM=../lightswitch
	@$(PYTHON) -m lightswitch.fork.update "$(FROM)"
	@$(MAKE) --no-print-directory test

"""


def of_fork(root: Path, name: str, bare: bool, pin: str | None) -> dict[str, File]:
    """Return the files of a fork by their paths.

    Args:
        root: of the checkout.
        name: of the fork's package.
        bare: with one small model and dataset in place of the examples.
        pin: pip requirement of the engine; None to include the engine's folder.
    """
    template = root / "template"
    taken = _chosen(repository.tracked(root), _listed(template / "taken.txt"))
    examples = _chosen(taken, _listed(template / "examples.txt"))
    kept = [path for path in taken if not (bare and path in examples)]
    files = _read(root, [path for path in kept if not path.startswith(f"{engine.FOLDER}/")])
    for folder in ("files", "bare") if bare else ("files",):
        inside = [path for path in repository.tracked(root) if path.startswith(f"template/{folder}/")]
        files |= {path.removeprefix(f"template/{folder}/"): file for path, file in _read(root, inside).items()}
    defaults = dict(re.findall(r"^  - (\w+): (\w+)$", Path(root, "conf", "config.yaml").read_text(), re.MULTILINE))
    removed = examples if bare else []
    fork = Fork(name, pin, removed, sorted(files), defaults)
    files = {renamed_path(path, name): _edited(path, file, fork) for path, file in sorted(files.items())}
    engine_files = {} if pin else _engine(root)
    pages = documents(root, name, {*files, *engine_files})
    if not pin:
        engine_files |= _manifest(root, engine_files, pages)
    return {**files, **engine_files, **{f"{DOCUMENTS}/{path}": File(content) for path, content in pages.items()}}


def _listed(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def _chosen(paths: list[str], listed: list[str]) -> list[str]:
    return [path for path in paths if any(path == one or path.startswith(one.rstrip("/") + "/") for one in listed)]


def _read(root: Path, paths: list[str]) -> dict[str, File]:
    where = {path: root / path for path in paths}
    return {path: File(at.read_bytes(), bool(at.stat().st_mode & 0o100)) for path, at in where.items()}


def _edited(path: str, file: File, fork: Fork) -> File:
    try:
        return File(edited(path, file.content.decode(), fork).encode(), file.is_executable)
    except UnicodeDecodeError:  # a binary file, such as an image
        return file


def _engine(root: Path) -> dict[str, File]:
    """Return the files of the engine's folder, unchanged, with the changelog among them."""
    inside = [path for path in repository.tracked(root) if path.startswith(f"{engine.FOLDER}/")]
    return _read(root, inside)


def _manifest(root: Path, files: dict[str, File], pages: dict[str, bytes]) -> dict[str, File]:
    content = {path.removeprefix(f"{engine.FOLDER}/"): file.content for path, file in files.items()}
    manifest = engine.manifest(content, pages, repository.version(root), repository.commit(root))
    return {f"{engine.FOLDER}/{engine.MANIFEST}": File(manifest)}


def documents(root: Path, name: str, there: Collection[str]) -> dict[str, bytes]:
    """Return the documents of a checkout by their paths in DOCUMENTS; links to files that a fork lacks become plain
    text.

    Args:
        name: of the fork's package.
        there: paths of the fork's files.
    """
    tracked = [path for path in repository.tracked(root) if path.startswith("docs/")]
    pages = [_FIRST, *(path for path in tracked if path != _OF_SITE and not path.endswith(".json"))]
    known = {path: path for path in there} | {path: f"{DOCUMENTS}/{path.removeprefix('docs/')}" for path in pages}
    contents = {path: (root / path).read_bytes() for path in pages}
    return {
        path.removeprefix("docs/"): _linked(path, content.decode(), known, name).encode()
        if path.endswith(".md")
        else content
        for path, content in contents.items()
    }


def _linked(page: str, text: str, known: dict[str, str], name: str) -> str:
    """Return the text of a page with its links adjusted to its place in a fork.

    Args:
        page: its path in the checkout.
        known: path in the fork of each file that the fork has, by path in the checkout.
    """

    folders = {str(parent) for one in known.values() for parent in PurePosixPath(one).parents}

    def link(found: re.Match[str]) -> str:
        words, target, part = found[1], found[2], found[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = renamed_path(os.path.normpath(PurePosixPath(page).parent / target), name)
        if (place := known.get(path, path if path in folders and not path.startswith("docs") else None)) is None:
            return words
        return f"[{words}]({os.path.relpath(place, PurePosixPath(known[page]).parent)}{part})"

    return _LINK.sub(link, text)


@dataclass(frozen=True)
class Fork:
    """Properties of a fork that the text of its files depends on.

    Attributes:
        pin: pip requirement of the engine, or None if it is a folder.
        removed: paths of the examples that are left out.
        paths: of all files except the engine's, before their package is renamed.
        defaults: the choices in the defaults of conf/config.yaml, by group.
    """

    name: str
    pin: str | None
    removed: Sequence[str]
    paths: Sequence[str]
    defaults: Mapping[str, str]

    @property
    def is_bare(self) -> bool:
        return bool(self.removed)

    def choice(self, group: str) -> str:
        """Return the default choice of a config group, or its first choice if the default was left out."""
        there = [choice for group_, choice in map(_config, self.paths) if group_ == group]
        return self.defaults[group] if self.defaults[group] in there else min(there)


def renamed_path(path: str, name: str) -> str:
    return re.sub(r"^(src|tests)/project(?=/)", rf"\1/{name}", path)


def edited(path: str, text: str, fork: Fork) -> str:
    """Return the text of a file with the changes for the fork."""
    if path in _AS_THEY_ARE:
        return text
    if path == "pyproject.toml":
        return _pyproject(text, fork)
    if path == "Makefile":
        text = _makefile(text, fork)
    if path.startswith("slurm/"):
        text = re.sub(r"(--job-name=)lightswitch", rf"\1{fork.name}", text)
    if path.startswith("cloud/"):
        text = text.replace("lightswitch", fork.name.replace("_", "-"))  # Kubernetes allows no _ in names
    if fork.is_bare:
        text = _without_examples(text, fork)
    return _filled(_renamed(text, fork.name), fork)


def _renamed(text: str, name: str) -> str:
    text = re.sub(r"(?<![\w.-])project(?=\.[a-z_])", name, text)
    text = re.sub(r"\b((?:src|tests)[/.])project\b", rf"\1{name}", text)
    text = re.sub(r"\b(from|import) project\b", rf"\1 {name}", text)
    block = rf"(?:^from (?:{name}|lightswitch|tests)[\w.]* import [^(\n]+\n)+"
    return re.sub(block, lambda lines: _sorted(lines[0]), text, flags=re.MULTILINE)


def _sorted(imports: str) -> str:
    """Return import lines in ruff's order, by the new name."""
    return "".join(sorted(imports.splitlines(keepends=True), key=lambda line: line.split()[1]))


def _config(path: str) -> tuple[str, str]:
    """Return the group and the choice of a config file's path; empty strings for another file."""
    parts = PurePosixPath(path).parts
    return (parts[1], PurePosixPath(path).stem) if len(parts) == 3 and parts[0] == "conf" else ("", "")


def _without_examples(text: str, fork: Fork) -> str:
    """Return a text without the choices that were left out; a command that only demonstrates one is removed."""
    gone = [_config(path) for path in fork.removed if _config(path)[0] in ("model", "data", "experiment")]
    for _, choice in gone:  # an entry of a dict in Python
        text = re.sub(rf'^    "{choice}": \(.*?^    \),\n', "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"= \{\n\}$", "= {}", text, flags=re.MULTILINE)
    for group in ("model", "data"):
        default = "|".join(choice for group_, choice in gone if group_ == group)
        text = re.sub(rf"^(\s*- {group}: )({default})$", rf"\1{fork.choice(group)}", text, flags=re.MULTILINE)
    words = "|".join(f"{group}={choice}" for group, choice in gone)
    text = re.sub(rf"^\s*python train\.py ({words})( .*)?\n", "", text, flags=re.MULTILINE)
    text = re.sub(rf" ({words})\b", "", text)
    models = "|".join(choice for group, choice in gone if group == "model")
    return re.sub(rf"\bruns/({models})\b", f"runs/{fork.choice('model')}", text)


def _filled(text: str, fork: Fork) -> str:
    """Return a template with each section from {{#WHEN}} to {{/WHEN}} included or removed, and each {{WORD}}
    replaced."""
    shown = {"examples": not fork.is_bare, "bare": fork.is_bare, "folder": fork.pin is None, "package": bool(fork.pin)}
    for when, is_shown in shown.items():
        kept = r"\1" if is_shown else ""
        text = re.sub(rf"^{{{{#{when}}}}}\n(.*?)^{{{{/{when}}}}}\n", kept, text, flags=re.MULTILINE | re.DOTALL)
    values = {"name": fork.name, "model": fork.choice("model"), "data": fork.choice("data"), "pin": fork.pin or ""}
    for word, value in values.items():
        text = text.replace(f"{{{{{word}}}}}", value)
    return text


def _without_other_versions(makefile: str) -> str:
    """Return a Makefile without the targets that test the engine with other versions of its dependencies."""
    makefile = re.sub(r"^test-(lowest|newest):.*\n(\t.*\n)+\n", "", makefile, flags=re.MULTILINE)
    for words in (
        *(" and the lowest", " test-lowest test-newest", " .venv-lowest .venv-newest"),
        *(" $(LOWEST_INSTALLED) $(NEWEST_INSTALLED):", " $(NEWEST_INSTALLED):"),
    ):
        makefile = makefile.replace(words, ":" if words.endswith(":") else "")
    line = r"(?:[^\n]*\\\n)*[^\n]*\n"  # with its continuation lines
    lines = re.findall(line, makefile)
    gone = {number for number, line in enumerate(lines) if re.search("(?i:lowest)|NEWEST", line)}
    gone |= {number - 1 for number in gone if number and lines[number - 1].startswith("#")}
    return "".join(line for number, line in enumerate(lines) if number not in gone)


def _makefile(text: str, fork: Fork) -> str:
    paragraphs = _without_other_versions(text).split("\n\n")
    gone = [part for part in paragraphs if re.search(rf"^\t.*({_NOT_OF_A_FORK})", part, re.MULTILINE)]
    text = "\n\n".join(part for part in paragraphs if part not in gone)
    targets = {target for part in gone for target in re.findall(r"^([\w-]+):", part, re.MULTILINE)}
    text = re.sub(
        r"^\.PHONY: .*$",
        lambda line: " ".join(word for word in [*line[0].split(" "), "update-engine"] if word not in targets),
        text,
        flags=re.MULTILINE,
    )
    text = _replaced(text, r"^clean:", f"{_UPDATE_ENGINE}clean:")
    text = _replaced(text, r"^WORKERS \?= \d+$", "WORKERS ?= 2")
    text = _replaced(text, r"^lint: .*\n(\t.*\n)+", _LINT)
    text = _replaced(text, r"^types: .*\n(\t.*\n)+\n", "")
    text = _replaced(text, r"^test: lint types ## .*$", 'test: $(INSTALLED) ## run the tests: make test ARGS="-k mine"')
    text = text.replace(" lint types ", " lint ")
    if fork.pin:
        text = text.replace("--all-extras", "--all-extras --no-emit-package lightswitch")
        pin = "$$(sed -nE 's/^ +\"(lightswitch[ =].*)\",$$/\\1/p' pyproject.toml)"
        engine = f'$(if $(WHEELHOUSE),lightswitch,"{pin}")'
        install = f"\t@$(PIP_INSTALL) --no-deps --no-build-isolation {engine}"
        wheel = f'\t@$(PYTHON) -m pip wheel -qq --no-deps --no-build-isolation --wheel-dir wheelhouse "{pin}"'
        text = _replaced(text, r"^\t@\$\(PIP_DOWNLOAD\) .*$", lambda line: f"{line[0]}\n{wheel}")
        text = _replaced(text, r"^(\t@\$\(PIP_INSTALL\).*--editable \.)$", lambda line: f"{install}\n{line[0]}")
    return text


def _pyproject(text: str, fork: Fork) -> str:
    text = _replaced(text, r'^name = "lightswitch"$', f'name = "{fork.name}"')
    text = _replaced(text, r'^version = ".*"$', 'version = "0.1.0"')
    text = _replaced(text, r'^description = ".*"$', f'description = "{fork.name}"')
    text = _replaced(text, r"(?:^#[^\n]*\n)*^dependencies = ", "dependencies = ")
    text = _replaced(text, r'^files = \["src", ', f'files = ["src/{fork.name}", ')
    text = re.sub(r'^    "slurm: .*\n', "", text, flags=re.MULTILINE)
    text = _replaced(text, r"^testpaths = .*$", 'testpaths = ["tests"]')
    text = _replaced(text, r'^    "error",\n', "")  # in a fork, a warning fails no test
    packages = [f"{fork.name}*", *([] if fork.pin else ["lightswitch*"])]
    text = _replaced(text, r"^include = \[.*\]$", f"include = {packages}".replace("'", '"'))
    if fork.is_bare:
        text = re.sub(r"^digits = .*\n", "", text, flags=re.MULTILINE)
    return _with_engine_as_package(text, fork.pin) if fork.pin else text


def _with_engine_as_package(text: str, pin: str) -> str:
    """Return a pyproject.toml that requires the engine as a package, and takes dependencies and extras from it."""
    listed = "".join(f'    "{one}",\n' for one in (pin, "lightning", "numpy", "torch", "torchmetrics"))
    text = _replaced(text, r"^dependencies = \[\n(    .*\n)*\]\n", f"dependencies = [\n{listed}]\n")
    text = re.sub(r"^\[tool.setuptools.package-data\]\n.*?\n\n", "", text, flags=re.MULTILINE | re.DOTALL)
    head, begin, rest = text.partition("[project.optional-dependencies]\n")
    extras, end, tail = rest.partition("\n\n")
    kept = re.findall(r"^(?:digits|dev) = \[.*?\](?=\n\w|\Z)", extras, re.MULTILINE | re.DOTALL)
    names = [name for name in re.findall(r"^(\w+) = \[", extras, re.MULTILINE) if name not in ("digits", "dev")]
    return head + begin + "\n".join([*(f'{name} = ["lightswitch[{name}]"]' for name in names), *kept]) + end + tail


def with_pin(pyproject: str, pin: str) -> str:
    """Return a fork's pyproject.toml with another requirement of the engine."""
    return _replaced(pyproject, r'^( +)"lightswitch[ =][^"]*",$', lambda line: f'{line[1]}"{pin}",')


def _replaced(text: str, pattern: str, by: str | Callable[[re.Match[str]], str]) -> str:
    """Return a text in which every match of a pattern is replaced.

    Raises:
        AssertionError: nothing matches, so the fork would keep the text that the pattern was meant for.
    """
    put = by if callable(by) else lambda _: by
    text, count = re.subn(pattern, put, text, flags=re.MULTILINE)
    assert count, f"found no {pattern}"
    return text
