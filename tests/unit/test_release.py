# SPDX-License-Identifier: Apache-2.0
"""One version in all places, what keeps a release from being made, and archives without a time."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from cyclonedx.model.component import ComponentType
from hypothesis import given
from hypothesis import strategies as st

import muster
from release import bill, version
from release.__main__ import texts_of
from release.archives import not_after, of_everybody, rewrite, write_gzip

ROOT = Path(__file__).parents[2]
LOG = "## 0.2.0 (2026-12-01)\n\n- it\n\n## 0.1.0 (2026-11-23)\n"
OPEN = LOG.replace("2026-12-01", "unreleased")


def test_all_places_say_the_version_and_it_has_its_section_in_the_changelog() -> None:
    texts = texts_of(ROOT)
    assert version.version_in((ROOT / version.SOURCE).read_text()) == muster.__version__
    assert list(version.disagreements(muster.__version__, texts)) == []
    log = texts[version.CHANGELOG]
    assert list(version.refusals(muster.__version__, log, (), (), dry_run=True)) == []


@pytest.mark.parametrize(
    ("is_version", "log", "tags", "changed", "dry_run", "words"),
    [
        ("0.2.0", LOG, ["v0.1.0"], [], False, []),
        ("0.2.0.dev0", OPEN, [], [], True, []),
        ("0.2.0rc1", OPEN, [], [], True, []),
        ("0.2.0", LOG, [], ["a", "b", "c", "d"], True, ["a, b, c and 1 more: not as the commit"]),
        ("0.3.0", LOG, [], [], True, ["no section 0.3.0"]),
        ("0.2.0", LOG, ["v0.2.0"], [], True, ["the tag v0.2.0 is there"]),
        ("0.2.0.dev0", OPEN, [], [], False, ["make it 0.2.0, or say --dry-run", "has no date"]),
    ],
)
def test_what_keeps_a_release_from_being_made_is_said(
    is_version: str,
    log: str,
    tags: list[str],
    changed: list[str],
    dry_run: bool,
    words: list[str],
) -> None:
    said = list(version.refusals(is_version, log, tags, changed, dry_run=dry_run))
    assert len(said) == len(words)
    assert all(word in sentence for word, sentence in zip(words, said, strict=True))


def test_each_place_that_says_another_version_is_named() -> None:
    texts = {
        version.CHART: "version: 0.2.0-dev.0\nappVersion: 0.1.0\n",
        version.CHANGELOG: OPEN,
        version.PROJECT: '"muster-elastic-lib==0.2.0.dev1",',
        "docs/a.md": "x\nmuster-sidecar:0.1.0 and muster-controller:0.2.0.\n",
    }
    said = list(version.disagreements("0.2.0.dev0", texts))
    assert said == [
        "charts/muster/Chart.yaml: appVersion is 0.1.0, make it 0.2.0.dev0",
        "pyproject.toml: muster-elastic-lib is 0.2.0.dev1, make it 0.2.0.dev0",
    ]
    # In a release itself, no example names the one before.
    final = [one for one in version.disagreements("0.2.0", texts) if one.startswith("docs")]
    assert final == ["docs/a.md:2: an image of 0.1.0, make it 0.2.0"]


def archive(names: list[str], mtime: int, owner: str) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as target:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.mtime, entry.uname, entry.size = mtime, owner, len(name)
            target.addfile(entry, io.BytesIO(name.encode()))
    made.seek(0)
    return made


@given(st.lists(st.from_regex(r"[a-z]{1,120}", fullmatch=True), unique=True), st.integers(1, 2**31))
def test_an_archive_says_nothing_of_when_and_by_whom_it_was_made(
    names: list[str], mtime: int
) -> None:
    found = set()
    for source in (archive(names, mtime, "a"), archive(names, mtime + 7, "b")):
        plain, packed = io.BytesIO(), io.BytesIO()
        rewrite(source, plain, of_everybody(1))
        plain.seek(0)
        write_gzip(plain, packed)
        found.add(packed.getvalue())
    assert len(found) == 1
    with tarfile.open(fileobj=io.BytesIO(found.pop())) as read:
        assert [entry.name for entry in read] == names


def test_a_layer_keeps_times_before_the_commit() -> None:
    plain = io.BytesIO()
    rewrite(archive(["a"], 5, "a"), plain, not_after(9))
    rewrite(archive(["a"], 50, "a"), second := io.BytesIO(), not_after(9))
    times = []
    for made in (plain, second):
        made.seek(0)
        with tarfile.open(fileobj=made) as read:
            times += [entry.mtime for entry in read]
    assert times == [5, 9]


def test_a_bill_of_materials_is_of_its_schema_and_the_same_twice(tmp_path: Path) -> None:
    values = (ROOT / "charts/muster/values.yaml").read_text()
    digest = "0" * 64
    written = set()
    for name in ("a", "b"):
        about = bill.subject("muster", "0.2.0", ComponentType.APPLICATION, digest)
        bill.write_bill(tmp_path / name, about, bill.images_of(values), 1, digest)
        written.add((tmp_path / name).read_bytes())
    assert len(written) == 1
    assert b"muster-controller" in written.pop()
