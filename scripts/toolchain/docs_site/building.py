# SPDX-License-Identifier: Apache-2.0
"""Stages the pages with the repository's layout, and has zensical build a site from them.

Links between pages are relative, as a git host requires. They also work on the site because the
staged tree has the repository's shape: docs/, README.md, and every file that a page links to, at
its path in the repository.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from docs_site.navigation import Group, groups
from docs_site.rendering import with_diagrams, with_plain_pipes, with_tabs

BUILD_TIMEOUT_S = 300

ITEM = re.compile(r"(?:[-*]|\d+\.) ")
FILE_LINK = re.compile(r"\[[\w./-]+\.md\]\((?P<target>[\w./-]+\.md)(?P<anchor>#[\w-]+)?\)")

CONFIGURATION = """\
[project]
site_name = "Muster"
site_description = "Elastic training on Kubernetes that loses no work"
docs_dir = "pages"
site_dir = "site"
extra_css = ["site.css"]
nav = {menu}

[project.theme]
language = "en"
font = false
features = [
  "content.code.copy",
  "content.tabs.link",
  "navigation.footer",
  "navigation.path",
  "navigation.sections",
  "navigation.tabs",
  "navigation.top",
  "search.highlight",
]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Switch to dark mode"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Switch to light mode"

[project.plugins.offline]
enabled = true

[project.markdown_extensions]
sane_lists = {{}}
tables = {{}}
pymdownx.highlight = {{}}
pymdownx.superfences = {{}}

# A tab has the anchor of the heading that it is made of.
[project.markdown_extensions.pymdownx.tabbed]
alternate_style = true
slugify.object = "pymdownx.slugs.slugify"
slugify.kwds.case = "lower"

# Anchors as a git host names them, so that a link to one holds on both.
[project.markdown_extensions.toc]
permalink = true
slugify.object = "pymdownx.slugs.slugify"
slugify.kwds.case = "lower"
"""

STYLE = """\
.md-grid { max-width: 84rem; }
/* A long line goes on in the next one, and keeps clear of the button that copies. */
.md-typeset pre > code { padding-right: 3rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.md-typeset .diagram pre > code { white-space: pre; }
.md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: 0.6em 0.8em; }
@media (max-width: 45em) {
  .md-typeset p:has(> img[src$=".svg"]) { overflow-x: auto; }
  .md-typeset p > img[src$=".svg"] { max-width: none; width: 42rem; }
}
.md-typeset thead:not(:has(th:not(:empty))) { display: none; }
"""


def build(repository: Path, site: Path) -> bool:
    """Replace the folder ``site`` by a fresh build; return False if zensical found a fault."""
    with tempfile.TemporaryDirectory(prefix="muster-docs-") as folder:
        staged = Path(folder)
        for path in sorted(_wanted(repository)):
            copy = staged / "pages" / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                page = with_lists_apart(with_titles(repository, path))
                page = with_tabs(with_plain_pipes(with_diagrams(page)))
                copy.write_text(page, encoding="utf-8")
            else:
                shutil.copyfile(repository / path, copy)
        configuration = CONFIGURATION.format(menu=_menu(groups(repository)))
        (staged / "zensical.toml").write_text(configuration, encoding="utf-8")
        (staged / "pages" / "site.css").write_text(STYLE, encoding="utf-8")
        command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
        done = subprocess.run(
            command, cwd=staged, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )
        if done.returncode:
            sys.stderr.write(done.stdout + done.stderr)
            return False
        shutil.rmtree(site, ignore_errors=True)
        site.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(staged / "site", site)
        return True


def with_titles(repository: Path, path: Path) -> str:
    """Return a page on which a link whose text is a file's name has that page's title instead.

    If the link names a section, it has that section's heading.
    """

    def titled(found: re.Match[str]) -> str:
        target = (repository / path).parent / found["target"]
        if not target.is_file():
            return found[0]
        headings = re.findall(r"^#+ +(.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        wanted = found["anchor"] or ""
        of_anchor = [one for one in headings if _anchor(one) == wanted.lstrip("#")]
        title = (of_anchor or [headings[0].partition(":")[0]])[0]
        return f"[{title}]({found['target']}{wanted})"

    return FILE_LINK.sub(titled, (repository / path).read_text(encoding="utf-8"))


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def with_lists_apart(page: str) -> str:
    """Insert a blank line between a paragraph and a list right below it, as zensical needs one."""
    lines: list[str] = []
    fenced = False
    for line in page.splitlines():
        before = lines[-1] if lines else ""
        starts = ITEM.match(line) and before and not before.startswith(" ")
        if starts and not fenced and not ITEM.match(before):
            lines.append("")
        fenced ^= line.startswith("```")
        lines.append(line)
    return "\n".join([*lines, ""])


def _wanted(repository: Path) -> set[Path]:
    """Return every page of the menu, and every file that one of them links to."""
    pages = [Path(page.path) for group in groups(repository) for page in group.pages]
    wanted = set(pages)
    for page in pages:
        for target in _linked(repository / page):
            path = Path(os.path.normpath(page.parent / target))
            if (repository / path).is_file():
                wanted.add(path)
    return wanted


def _linked(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            yield target


def _menu(parts: list[Group]) -> str:
    """Render the menu in TOML, whose strings may be written as in JSON."""
    rows = []
    for group in parts:
        pages = ", ".join(
            f"{{ {json.dumps(page.label)} = {json.dumps(page.path)} }}" for page in group.pages
        )
        rows.append(f"  {{ {json.dumps(group.label)} = [{pages}] }},")
    return "\n".join(["[", *rows, "]"])
