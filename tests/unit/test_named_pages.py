# SPDX-License-Identifier: Apache-2.0
"""A page and heading that a message of the program names is there."""

from __future__ import annotations

import ast
import re

from tests.support.headings import anchors
from tests.support.sources import ROOT, relative, sources, tree

NAMED = re.compile(r"docs/([\w-]+\.md)(?:#([\w-]+))?")


def named_in_messages() -> set[tuple[str, str, str]]:
    """The source, the page and the heading of each that a text of the product names."""
    texts = (
        (relative(path), node.value)
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {(path, *found) for path, text in texts for found in NAMED.findall(text)}


def headings(page: str) -> set[str]:
    """The headings of a page, as links spell them; the page itself is the empty one."""
    path = ROOT / "docs" / page
    return {"", *anchors(path)} if path.exists() else set()


def test_every_page_and_heading_that_a_message_names_is_there() -> None:
    named = named_in_messages()
    assert {"operations.md", "security.md", "local.md"} <= {page for _, page, _ in named}
    missing = [one for one in sorted(named) if one[2] not in headings(one[1])]
    assert missing == []
