# SPDX-License-Identifier: Apache-2.0
"""The site of the pages is made by zensical, strictly, and every link of it leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs_site.building import build
from docs_site.links import broken
from docs_site.navigation import groups

ROOT = Path(__file__).parents[2]


def test_the_site_is_made_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    assert build(ROOT, tmp_path)
    assert broken(tmp_path) == []
    listed = {page.path for group in groups(ROOT) for page in group.pages}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} <= listed
    made = [path for path in tmp_path.rglob("*.html") if path.name != "404.html"]
    assert len(made) == len(listed)
    for page in made:
        assert re.search(r"<h1\b", page.read_text(encoding="utf-8")), page


@pytest.mark.parametrize("target", ["missing.md", "other.md#nowhere", "../LICENSE"])
def test_a_page_with_a_link_to_nowhere_makes_no_site(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "repository" / "docs"
    docs.mkdir(parents=True)
    (docs / "README.md").write_text("# Pages\n\n## Start\n\n- [one](one.md)\n- [other](other.md)\n")
    (docs / "one.md").write_text(f"# One\n\nSee [there]({target}).\n")
    (docs / "other.md").write_text("# Other\n\n## Somewhere\n")
    site = tmp_path / "site"
    found = broken(site) if build(tmp_path / "repository", site) else [capsys.readouterr().err]
    assert any("one." in link for link in found)


def test_links_and_anchors_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="#top"></a><a href="#gone"></a><a href="b.html#in"></a>'
        '<a href="b.html#out"></a><img src="c.svg"><a href="https://example.org/x"></a>'
    )
    (tmp_path / "b.html").write_text('<h2 id="in"></h2>')
    assert broken(tmp_path) == [
        "a.html: #gone leads nowhere",
        "a.html: b.html#out leads nowhere",
        "a.html: c.svg leads nowhere",
    ]
