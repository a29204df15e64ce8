# SPDX-License-Identifier: Apache-2.0
"""docs/launchers.md, from what the rows came to when they last ran."""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tests.support.launchers.life import COLUMNS
from tests.support.launchers.refused import REFUSED, Refused
from tests.support.launchers.rows import ROWS, Row, deepspeed_folder
from tests.support.training.pods import ROOT

PAGE = ROOT / "docs" / "launchers.md"
RECORD = Path(__file__).parent / "outcomes.json"
NOT_RUN = "not run"
WIDTH = 100
"""Of a launch line, in characters."""
LINES = [row for row in ROWS if row.library in ("", "accelerate")]
"""The rows of the other libraries have the line of the first one."""
LIBRARIES = ("torch", "accelerate", "lightning", "transformers", "deepspeed")


def recorded() -> dict[str, Any]:
    """Return what each row came to, by column, and the versions that ran."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def record(row: Row, outcomes: dict[str, str]) -> None:
    """Put what a row came to on record."""
    kept = recorded()
    kept["rows"][row.name] = outcomes
    kept["rows"] = {one.name: kept["rows"][one.name] for one in ROWS if one.name in kept["rows"]}
    for library in filter(None, ("torch", row.library)):
        path = [deepspeed_folder()] if library == "deepspeed" else sys.path
        (found, *_) = distributions(name=library, path=path)
        kept["versions"][library] = found.version
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")


def render() -> str:
    """Render the page."""
    kept = recorded()
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in ROWS:
        found = kept["rows"].get(row.name, {})
        alike.setdefault(tuple(found.get(one, NOT_RUN) for one in COLUMNS), []).append(row.name)
    lines = [["", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    lines += [["; ".join(names), *outcomes] for outcomes, names in alike.items()]
    versions = [
        f"{name} {kept['versions'][name]}" for name in LIBRARIES if name in kept["versions"]
    ]
    return (
        (Path(__file__).parent / "page.md")
        .read_text()
        .replace("TABLE", "\n".join(f"| {' | '.join(cells)} |" for cells in lines))
        .replace("VERSIONS", ", ".join(versions))
        .replace("LINES", "\n".join(map(_line, LINES)))
        .replace("REFUSED", "\n".join(map(_refused, REFUSED)))
    )


def _refused(one: Refused) -> str:
    return f"| {one.name} | `{one.line}` | `{one.said()}` |"


def _line(row: Row) -> str:
    """Render a row's line, and the files that it needs."""
    texts = [f"### {row.name}", _block(f"sh -c '{row.line}'" if row.staged else row.line)]
    for name, text in row.files.items():
        texts += [f"with this `{name}`:", _block(text)]
    return "\n\n".join(texts) + "\n"


def _block(text: str) -> str:
    """Render shell or Python; a longer line goes on in the next one."""
    return "\n".join(
        f"    {part}" if part else "" for line in text.splitlines() for part in _folded(line)
    )


def _folded(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    words = line.replace(" --", "\n--").splitlines()
    parts = [words[0]]
    for word in words[1:]:
        if len(parts[-1]) + len(word) < WIDTH:
            parts[-1] += f" {word}"
        else:
            parts.append(f"  {word}")
    return [f"{part} \\" for part in parts[:-1]] + parts[-1:]
