# SPDX-License-Identifier: Apache-2.0
"""The menu of the site: the groups and pages of docs/README.md, in its order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

INDEX = "docs/README.md"


@dataclass(frozen=True)
class Page:
    """One entry of the menu."""

    label: str
    path: str
    """The path relative to the repository, with slashes."""


@dataclass(frozen=True)
class Group:
    """A part of the menu: a second-level heading of the index."""

    label: str
    pages: tuple[Page, ...]


def groups(repository: Path) -> list[Group]:
    """Read the menu from the index; the index itself becomes the last page of the first group."""
    index = (repository / INDEX).read_text(encoding="utf-8")
    sections = re.split(r"^## +(.+)$", index, flags=re.MULTILINE)[1:]
    found = [
        Group(label.strip(), tuple(_pages(repository, text)))
        for label, text in zip(sections[::2], sections[1::2], strict=True)
    ]
    first = Group(found[0].label, (*found[0].pages, Page("All pages", INDEX)))
    return [first, *found[1:]]


def _pages(repository: Path, section: str) -> list[Page]:
    """Return the pages of a section: the first link of each row of a table, and of each item."""
    links = re.findall(r"^(?:\| |- )\[[^\]]+\]\(([^)#]+\.md)\)", section, re.MULTILINE)
    return [_page(repository, target) for target in links]


def _page(repository: Path, target: str) -> Page:
    path = (repository / PurePosixPath(INDEX).parent / target).resolve()
    title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").strip()
    # A title may continue after a colon; the menu has room for the part before it.
    title = title.partition(":")[0].replace("`", "")
    return Page(title, path.relative_to(repository.resolve()).as_posix())
