# SPDX-License-Identifier: Apache-2.0
"""What the documents say is what the project does; ``test_docs_site.py`` follows their links."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from console.main import TASKS
from tests.support.headings import anchors
from tests.support.sources import ROOT, relative, sources, tree


def test_the_configuration_page_is_made_from_the_table_of_settings() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "generate-configuration-docs"))
    assert (ROOT / "docs" / "configuration.md").read_text() == script["render"]()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def pages() -> list[Path]:
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    ]


def linked_from(page: Path) -> set[Path]:
    """The files of ours that a page links to."""
    found = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / name).resolve() for name in found if "://" not in name}


def test_every_page_and_heading_that_a_message_names_is_there() -> None:
    texts = (
        node.value
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    named = {one for text in texts for one in re.findall(r"docs/([\w-]+\.md)(?:#([\w-]+))?", text)}
    assert {"operations.md", "security.md", "local.md"} <= {page for page, _ in named}
    missing = [
        (page, heading)
        for page, heading in sorted(named)
        if heading not in {"", *anchors(ROOT / "docs" / page)}
    ]
    assert missing == []


def test_the_index_has_each_page_once() -> None:
    assert ROOT / "docs" / "README.md" in linked_from(ROOT / "README.md")
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w-]+\.md)\]\(\1\) \|", index, re.MULTILINE)
    assert sorted(rows) == sorted({*rows})
    assert {*rows} == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_what_was_measured_and_when_is_on_engineering_pages_alone() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    users, found, _ = index.partition("## Engineering")
    assert found
    names = re.findall(r"\]\(([\w-]+\.md)\)", users)
    dated = {
        name: re.findall(r"20\d\d-\d\d-\d\d", (ROOT / "docs" / name).read_text(encoding="utf-8"))
        for name in names
    }
    assert {name: dates for name, dates in dated.items() if dates} == {}


def test_every_picture_is_on_a_page() -> None:
    pictures = {*(ROOT / "docs").rglob("*.svg")}
    assert pictures
    assert pictures - set().union(*map(linked_from, pages())) == set()


def test_the_index_has_the_decisions_by_their_titles() -> None:
    titles = [
        re.sub(r"^# (.*)$", rf"- [\1](decisions/{path.name})", path.read_text().splitlines()[0])
        for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))
    ]
    lines = (ROOT / "docs" / "README.md").read_text().splitlines()
    assert [line for line in lines if "(decisions/" in line] == titles


@pytest.mark.parametrize("page", pages(), ids=relative)
def test_every_page_and_script_that_a_document_names_is_there(page: Path) -> None:
    named = re.findall(
        r"`((?:docs|scripts|examples|rdzv|launcher_shim|agent|console|tests)/[\w./*-]+)[`:\s]",
        page.read_text(),
    )
    missing = [name for name in sorted({*named}) if not any(ROOT.glob(name))]
    assert missing == []


def test_the_gallery_has_every_example_and_the_command_that_it_names() -> None:
    gallery = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|.*\| `([^`]+)` \|", gallery, re.MULTILINE))
    assert {*rows} == {path.name for path in (ROOT / "examples").glob("*.py")}
    for name, command in rows.items():
        script = ast.parse((ROOT / "examples" / name).read_text(encoding="utf-8"))
        page = ast.get_docstring(script, clean=False)
        assert page is not None
        assert f"\n    {command}\n" in page, name


@pytest.mark.parametrize("example", ["torch_ddp.py", "test_drain.py"])
def test_an_example_on_the_page_of_training_is_the_one_that_is_run(example: str) -> None:
    """Less what its reader need not see there, and as far to the left as a page has room."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    _, named, text = page.partition(f"`examples/{example}`")
    assert named
    shown = re.search(r"\n\n((?:    .*\n|\n)+)", text)
    assert shown is not None
    lines = iter((ROOT / "examples" / example).read_text(encoding="utf-8").splitlines())
    for line in filter(None, map(str.strip, shown[1].splitlines())):
        assert any(line == one.strip() for one in lines), line


def test_every_part_in_the_picture_of_the_architecture_is_there() -> None:
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    missing, room = [], ""
    for kind, text in re.findall(r'<text class="(title|name)" x="\d+" y="\d+">([^<]+)<', picture):
        if kind == "title":
            room = text
            continue
        folder, _, names = text.rpartition(": ")
        missing += [
            f"{room}{folder}{name}"
            for name in names.split(", ")
            if not any((ROOT / room / folder).glob(f"{name.rstrip('/')}*"))
        ]
    assert room
    assert missing == []


def test_the_page_of_the_sidecar_has_every_metric() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "agent").rglob("*.py"))
    page = (ROOT / "docs" / "sidecar.md").read_text(encoding="utf-8")
    # A counter is exported with the ending that Prometheus wants.
    exported = {name.removesuffix("_total") for name in re.findall(r'"(muster_[a-z0-9_]+)"', code)}
    named = {name.removesuffix("_total") for name in re.findall(r"^\| `(muster_\w+)", page, re.M)}
    assert exported == named


def test_the_readme_has_every_command() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`muster .*?) \|", page, re.MULTILINE)
    named = re.findall(r"`(?:muster )?([a-z][a-z-]+)", " ".join(rows))
    assert sorted({*named}) == sorted(name for commands in TASKS.values() for name in commands)
