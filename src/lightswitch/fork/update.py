"""Replace the engine of a fork by another, and say what is new in it and what the fork must change.

python -m lightswitch.fork.update ../lightswitch                          # a checkout
python -m lightswitch.fork.update git+https://host/lightswitch@v0.2.0     # a git address, at a tag, branch or commit
python -m lightswitch.fork.update lightswitch-0.2.0-py3-none-any.whl      # a wheel; or, of a package, a version

Where the engine is the folder src/lightswitch, it is replaced whole, and not if it was changed here. Where it is a
package, its requirement in pyproject.toml is replaced, and installed.
"""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightswitch.errors import Refused, listed
from lightswitch.fork import checkout, engine
from lightswitch.fork.__main__ import exit_with
from lightswitch.fork.repository import File, write
from lightswitch.fork.text import with_pin


@dataclass(frozen=True)
class Source:
    """An engine: its files, by their path in the folder, and what else of its checkout is known."""

    files: Mapping[str, bytes]
    version: str
    commit: str = ""
    pyproject: str = ""
    train: str = ""


def main() -> None:
    if len(sys.argv) != 2 or not sys.argv[1] or sys.argv[1].startswith("-"):
        exit_with("name the new engine: make update-engine FROM=PATH, a wheel, or git+https://…@REF")
    try:
        _update(sys.argv[1], Path.cwd())
    except (OSError, Refused, zipfile.BadZipFile) as error:
        exit_with(str(error))


def _update(given: str, fork: Path) -> None:
    folder, pyproject = fork / engine.FOLDER, fork / "pyproject.toml"
    if (folder / engine.MANIFEST).is_file():
        with tempfile.TemporaryDirectory() as space:
            _replace_folder(folder, _source(given, Path(space)), fork)
    elif pyproject.is_file() and re.search(r'^ +"lightswitch[ =]', pyproject.read_text(), re.MULTILINE):
        _replace_pin(given, pyproject)
    else:
        raise Refused(f"found neither {engine.FOLDER}/{engine.MANIFEST} nor a requirement of lightswitch in {fork}")
    # by the new engine's own code, in a process that has not read the old one's
    subprocess.run([sys.executable, "-m", "lightswitch.config.moved", "conf"], cwd=fork, check=False)


def _replace_folder(folder: Path, new: Source, fork: Path) -> None:
    _refuse_changed(folder, fork)
    manifest = json.loads((folder / engine.MANIFEST).read_text())
    before = engine.read(folder)
    for path in before.keys() - new.files.keys():
        (folder / path).unlink()
    files = {**new.files, engine.MANIFEST: engine.manifest(new.files, new.version, new.commit)}
    write(folder, {path: File(content) for path, content in files.items()})
    print(f"engine     {_named(manifest['version'], manifest['commit'])} → {_named(new.version, new.commit)}")
    _tell_news(*(content.get(engine.CHANGELOG, b"").decode() for content in (before, new.files)))
    for line in _requirements(new.pyproject, (fork / "pyproject.toml").read_text()):
        print(line)
    if new.train and _code(new.train) != _code((fork / "train.py").read_text()):
        print("train.py   is not as the new engine's; take over what differs from the one beside the new engine")


def _refuse_changed(folder: Path, fork: Path) -> None:
    changed = engine.changed(folder)
    if not changed:
        return
    written = checkout.git(fork, "log", "-1", "--format=%H", "--", f"{engine.FOLDER}/{engine.MANIFEST}").strip()
    if written:
        paths = [f"{engine.FOLDER}/{path}" for path in changed]
        print(checkout.git(fork, "diff", written, "--", *paths), end="")
    raise Refused(
        f"{engine.FOLDER}/{listed(changed, shown=1)} was changed in this fork, and would be lost; take the change back "
        f"(git checkout {written[:7] or 'COMMIT'} -- {engine.FOLDER}), or bring it to lightswitch itself"
    )


def _source(given: str, space: Path) -> Source:
    if given.endswith(".whl"):
        return _wheel(Path(given))
    if Path(given).is_dir():
        return _checkout(Path(given).resolve())
    if engine.is_git(given):
        return _clone(given, space / "clone")
    raise Refused(
        f"{given} is no folder, no wheel and no git address; use ../lightswitch, PATH.whl or git+https://…@REF"
    )


def _clone(given: str, into: Path) -> Source:
    address, at, ref = given.removeprefix("git+").rpartition("@")
    if not at or "/" not in address:  # an @ of its own, as in git@host:path
        address, ref = given.removeprefix("git+"), ""
    checkout.git(Path(), "clone", "--quiet", address, str(into))
    if ref:
        checkout.git(into, "checkout", "--quiet", "--detach", ref)
    return _checkout(into)


def _checkout(root: Path) -> Source:
    if not (root / engine.FOLDER / "__init__.py").is_file() or not (root / "pyproject.toml").is_file():
        raise Refused(f"found no {engine.FOLDER} in {root}; name a checkout of lightswitch")
    inside = [path for path in checkout.tracked(root) if path.startswith(f"{engine.FOLDER}/")]
    there = {path.removeprefix(f"{engine.FOLDER}/"): root / path for path in inside if (root / path).is_file()}
    files = {path: at.read_bytes() for path, at in there.items() if path != engine.MANIFEST}
    if (root / engine.CHANGELOG).is_file():  # where the engine's own is a link to it, or, of an older one, is not there
        files[engine.CHANGELOG] = (root / engine.CHANGELOG).read_bytes()
    pyproject, train = (root / "pyproject.toml").read_text(), (root / "train.py").read_text()
    return Source(files, checkout.version(root), checkout.commit(root), pyproject, train)


def _wheel(path: Path) -> Source:
    with zipfile.ZipFile(path) as wheel:
        files = {
            name.removeprefix("lightswitch/"): wheel.read(name)
            for name in wheel.namelist()
            if name.startswith("lightswitch/") and not name.endswith("/")
        }
    if "__init__.py" not in files:
        raise Refused(f"{path} is no wheel of lightswitch")
    return Source(files, path.name.split("-")[1])


def _replace_pin(given: str, pyproject: Path) -> None:
    before, pin = pyproject.read_text(), engine.requirement(given)
    news_before = _installed_changelog()
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--force-reinstall", pin]
    if subprocess.run(command).returncode:
        raise Refused(f"pip could not install {pin}; the requirement stays as it was")
    pyproject.write_text(with_pin(before, pin))
    print(f"engine     {pin}")
    _tell_news(news_before, _installed_changelog())


def _installed_changelog() -> str:
    path = Path(__file__).resolve().parents[1] / engine.CHANGELOG
    return path.read_text() if path.is_file() else ""


def _tell_news(before: str, now: str) -> None:
    """What the new changelog has and the old has not."""
    news = [line[2:] for line in difflib.ndiff(before.splitlines(), now.splitlines()) if line.startswith("+ ")]
    text = "\n".join(news).strip()
    print(f"\n{text}\n" if text else "changelog  has nothing new")


def _requirements(new: str, own: str) -> Iterator[str]:
    """What the new engine asks for and the fork does not."""
    there = re.search(r"^dependencies = \[\n((?:    .*\n)*)\]", new, re.MULTILINE)
    for requirement in re.findall(r'^    "(.*?)"', there[1] if there else "", re.MULTILINE):
        if f'"{requirement}"' not in own:
            yield f"needs      {requirement}: put it into the dependencies of pyproject.toml; type make constraints"


def _code(train: str) -> str:
    """Without the docstring, which is the fork's own."""
    return train.split('"""', 2)[-1]


def _named(version: str, commit: str) -> str:
    return f"{version} ({commit[:7]})" if commit else version


if __name__ == "__main__":
    main()
