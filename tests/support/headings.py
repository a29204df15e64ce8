# SPDX-License-Identifier: Apache-2.0
"""The headings of a page, by the anchors that a git host gives them."""

from __future__ import annotations

import re
from pathlib import Path


def anchors(page: Path) -> set[str]:
    """Spell each heading as a link does; what a block of code has is none."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}
