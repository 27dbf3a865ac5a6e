"""What a changelog has that an older one has not."""

from lightswitch.fork.update import news

BEFORE = """# Changelog

What changes.

## [Unreleased]

### Added
- Owls.

### Changed
- Songs are longer.

## [0.1.0]

### Added
- Songs.
"""
TABLE = """- **Names have changed.**

  | before | now |
  | --- | --- |
  | `owl` | `owls` |"""


def test_nothing_is_new_in_the_same_changelog() -> None:
    assert news(BEFORE, BEFORE) == ""


def test_an_entry_comes_whole_below_its_headings() -> None:
    now = BEFORE.replace("### Changed\n", f"### Changed\n{TABLE}\n")
    assert news(BEFORE, now) == f"## [Unreleased]\n\n### Changed\n{TABLE}"


def test_entries_of_one_kind_have_one_heading() -> None:
    now = BEFORE.replace("- Owls.\n", "- Owls.\n- Larks.\n- Wrens.\n\n### Fixed\n- A note.\n")
    assert news(BEFORE, now) == "## [Unreleased]\n\n### Added\n- Larks.\n- Wrens.\n\n### Fixed\n- A note."


def test_a_new_version_has_all_of_its_entries() -> None:
    now = BEFORE.replace("## [Unreleased]", "## [Unreleased]\n\n## [0.2.0]")
    assert news(BEFORE, now).startswith("## [0.2.0]\n\n### Added\n- Owls.\n\n### Changed\n- Songs are longer.")
