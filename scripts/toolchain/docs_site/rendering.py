# SPDX-License-Identifier: Apache-2.0
"""Changes to a page for the site, where a git host needs another form or has none."""

from __future__ import annotations

import re
from collections.abc import Iterator

TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->\n", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
DRAWN = re.compile(r"[─│┌└]")


def with_tabs(page: str) -> str:
    """Make the sections between the two comments tabs, each with its heading's anchor."""
    return TABS.sub(lambda found: "\n".join(_tabs(found[1])), page)


def _tabs(sections: str) -> Iterator[str]:
    for section in re.split(r"^(?=## )", sections, flags=re.MULTILINE):
        heading, _, text = section.partition("\n")
        if heading:
            yield f'=== "{heading.removeprefix("## ")}"'
            yield from (f"    {line}" if line else "" for line in text.splitlines())
    yield ""


def with_diagrams(page: str) -> str:
    """Fence code blocks that are drawings: their lines may not be broken on a narrow screen."""

    def fenced(found: re.Match[str]) -> str:
        if not DRAWN.search(found[0]) or found[0].isspace():
            return found[0]
        lines = [line[4:] for line in found[0].strip("\n").splitlines()]
        return "\n".join(["", "```{ .text .diagram }", *lines, "```", "", ""])

    return CODE.sub(fenced, page)


def with_plain_pipes(page: str) -> str:
    r"""Write ``|`` for ``\|`` within code in a table's cells, as zensical reads it."""
    rows = []
    for line in page.splitlines():
        if line.startswith("|"):
            line = re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line)
        rows.append(line)
    return "\n".join([*rows, ""])
