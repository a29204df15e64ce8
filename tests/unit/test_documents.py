# SPDX-License-Identifier: Apache-2.0
"""What the documents say is what the project does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_made_from_the_table_of_settings() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "generate-configuration-docs"))
    assert (ROOT / "docs" / "configuration.md").read_text() == script["render"]()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(
    "page", ["README.md", "docs/configuration.md", "docs/protocol.md", "docs/training.md"]
)
def test_every_page_and_script_that_a_document_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    named = set(
        re.findall(r"`((?:docs|scripts|examples|rdzv|launcher_shim|agent|tests)/[\w./-]+)", text)
    )
    assert named
    assert [name for name in sorted(named) if not (ROOT / name.rstrip("/")).exists()] == []
