# SPDX-License-Identifier: Apache-2.0
"""Checks every link of a built site that points into the site, and every anchor."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

NOT_FOUND = "404.html"
"""The page that is served at any address, so that its links are relative to the site's root."""


class PageLinks(HTMLParser):
    """The anchors of one page, and the targets of its links and images."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an element's id and its link target."""
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.targets.append(value)


def broken(site: Path) -> list[str]:
    """Return a sentence for each broken link, with its page."""
    pages = {
        path.resolve(): PageLinks(path) for path in site.rglob("*.html") if path.name != NOT_FOUND
    }
    return [
        f"{page.relative_to(site.resolve())}: {target} leads nowhere"
        for page, links in sorted(pages.items())
        for target in sorted({*links.targets})
        if not _leads(page, target, pages)
    ]


def _leads(page: Path, target: str, pages: dict[Path, PageLinks]) -> bool:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return True
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if path.is_dir():
        path /= "index.html"
    if not path.is_file():
        return False
    if not parts.fragment or path not in pages:
        return True
    return unquote(parts.fragment) in pages[path].anchors
