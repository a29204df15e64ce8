# SPDX-License-Identifier: Apache-2.0
"""The site of the pages is made by zensical, strictly, and every link of it leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs_site.building import build, with_lists_apart, with_titles
from docs_site.links import broken
from docs_site.navigation import groups
from docs_site.rendering import with_diagrams, with_plain_pipes, with_tabs

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


def test_a_link_has_a_title_in_place_of_a_file_s_name(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text("# One: the first\n\n## What it `costs`\n")
    (tmp_path / "two.md").write_text(
        "[one.md](one.md) [one.md](one.md#what-it-costs) [one](one.md) [gone.md](gone.md)"
    )
    assert with_titles(tmp_path, Path("two.md")) == (
        "[One](one.md) [What it `costs`](one.md#what-it-costs) [one](one.md) [gone.md](gone.md)"
    )


def test_a_list_right_below_a_paragraph_is_one_on_the_site_too() -> None:
    page = "So:\n- one\n  and more\n- two\n\n```\nx\n- y\n```\n"
    assert with_lists_apart(page) == "So:\n\n- one\n  and more\n- two\n\n```\nx\n- y\n```\n"


def test_sections_between_two_comments_are_tabs_on_the_site() -> None:
    page = "a\n\n<!-- tabs -->\n## One\n\ntext\n\n## Two\n\n- x\n<!-- end of tabs -->\n\n## Three\n"
    assert with_tabs(page) == ('a\n\n=== "One"\n\n    text\n\n=== "Two"\n\n    - x\n\n## Three\n')


def test_drawings_alone_keep_their_long_lines() -> None:
    page = "a\n\n    pip install x\n\nb\n\n    x ── y\n      │\n\nc\n"
    assert with_diagrams(page) == (
        "a\n\n    pip install x\n\nb\n\n```{ .text .diagram }\nx ── y\n  │\n```\n\nc\n"
    )


def test_a_pipe_in_a_cell_s_code_is_no_backslash() -> None:
    assert with_plain_pipes("| `a \\| b` | c |\n`a \\| b`\n") == "| `a | b` | c |\n`a \\| b`\n"
