"""The documentation site is not built with a dead link or a lost page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_site import built_in, copy

__all__ = ["copy"]  # a fixture


@pytest.mark.parametrize("link", ["gone.md", "strategies.md#gone"])
def test_a_dead_link_or_anchor_fails(copy: Path, link: str) -> None:
    with (copy / "docs" / "data.md").open("a") as page:
        page.write(f"\n[more]({link})\n")
    built = built_in(copy)
    assert built.returncode != 0
    assert "gone" in built.stderr


def test_a_page_that_is_not_in_the_navigation_fails(copy: Path) -> None:
    (copy / "docs" / "lost.md").write_text("# Lost\n")
    built = built_in(copy)
    assert built.returncode != 0
    assert "lost.md" in built.stderr
