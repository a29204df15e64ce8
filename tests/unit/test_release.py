# SPDX-License-Identifier: Apache-2.0
"""Developers' tools: releases, images, published figures, and what scripts/kubelab may end."""

from __future__ import annotations

import io
import os
import re
import signal
import tarfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubelab import network, processes

import muster
from benchmarks import gather
from benchmarks.figures import Bar, of_runs, percentile
from release import version
from release.__main__ import texts_of
from release.archives import not_after, of_everybody, rewrite, write_gzip
from tests.support.cluster import claim
from tests.support.cluster.lab import Kubelab

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
    is_version: str, log: str, tags: list[str], changed: list[str], dry_run: bool, words: list[str]
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


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(requirement: str) -> str:
    return (
        re.split(r"[\[=<>!~; ]", requirement, maxsplit=1)[0]
        .lower()
        .replace("_", "-")
        .replace(".", "-")
    )


def pinned(name: str) -> dict[str, str]:
    """Versions by name; each requirement must have a hash."""
    found = {}
    for requirement in re.sub(r"\\\n", " ", (ROOT / "scripts" / name).read_text()).splitlines():
        if requirement and not requirement.startswith("#"):
            pin, _, hashes = requirement.partition(" ")
            project, _, version = pin.partition("==")
            assert "--hash=sha256:" in hashes, requirement
            found[name_of(project)] = version
    return found


def versions_tested() -> dict[str, str]:
    """Versions that the tests run with, by name."""
    found = {}
    for name in ("constraints.txt", "constraints-tools.txt"):
        for line in (ROOT / "scripts" / name).read_text().splitlines():
            project, _, version = line.partition("==")
            found[name_of(project)] = version
    return found


@pytest.mark.parametrize("name", ["sidecar-requirements.txt", "controller-requirements.txt"])
def test_every_dependency_is_installed_at_the_version_that_the_tests_have(name: str) -> None:
    wanted = {
        "sidecar-requirements.txt": PROJECT["project"]["dependencies"],
        "controller-requirements.txt": PROJECT["project"]["optional-dependencies"]["controller"],
    }
    image = pinned(name)
    # The library of this repository is in the program's own wheel, too.
    assert {name_of(each) for each in wanted[name]} - {"muster-elastic-lib"} <= image.keys()
    assert image == {name: versions_tested()[name] for name in image}


def test_the_training_image_of_the_quick_start_has_what_the_tests_have() -> None:
    text = (ROOT / "examples" / "kubernetes" / "quickstart" / "Dockerfile").read_text()
    image = dict(re.findall(r"([\w-]+)==([\d.]+)", text))
    assert image == {name: versions_tested()[name] for name in ("torch", "numpy", "scikit-learn")}
    (script,) = re.findall(r"^COPY (\S+) ", text, re.MULTILINE)
    assert (ROOT / "examples" / script).is_file()


@pytest.mark.parametrize("requirement", PROJECT["build-system"]["requires"])
def test_the_build_has_what_builds_the_project(requirement: str) -> None:
    version = pinned("sidecar-build-requirements.txt")[name_of(requirement)]
    least, _, limit = requirement.partition(">=")[2].partition(",<")
    assert int(least) <= int(version.split(".")[0]) < int(limit)


@pytest.mark.parametrize(
    ("count", "share", "expected"), [(300, 0.99, 297), (100, 0.07, 7), (3, 0.5, 2), (1, 0.99, 1)]
)
def test_a_percentile_is_the_least_value_that_enough_do_not_exceed(
    count: int, share: float, expected: int
) -> None:
    assert percentile([float(n) for n in range(count, 0, -1)], share) == expected


@pytest.mark.parametrize(
    ("bar", "ok"),
    [
        (Bar("value", "<=", 2), True),
        (Bar("value", "<=", 1.9), False),
        (Bar("value", "==", 2), True),
        (Bar("ratio", ">=", 0.5), True),
        (Bar("ratio", ">=", 0.51), False),
        (None, True),
    ],
)
def test_a_bar_judges_the_median_or_its_ratio(bar: Bar | None, ok: bool) -> None:
    assert of_runs("x", "s", bar, [9, 2, 1], [4, 4, 1]).ok is ok


def test_worlds_for_newcomers_and_the_share_of_time_trained() -> None:
    def world(first_s: float, last_s: float) -> dict[str, object]:
        at = [first_s + 0.5 * n for n in range(round((last_s - first_s) / 0.5) + 1)]
        return {"points": [(moment, 1) for moment in at]}

    undisturbed = {"worlds": [world(3, 200)]}
    assert gather.judged(undisturbed) == (0, 1.0)
    joined = {"worlds": [world(3, 60), world(67, 200), {"points": []}]}
    assert gather.judged(joined) == (1, 1 - 7 / gather.JUDGED_S)
    # The last world does not come about.
    lost = {"worlds": [world(3, gather.BEGIN_S + gather.JUDGED_S / 2)]}
    assert gather.judged(lost) == (0, 0.5)


def test_a_pid_that_was_given_out_again_is_nobodys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "PIDS", tmp_path)
    ticks = processes.started_ticks(os.getpid())
    assert ticks is not None
    (tmp_path / "ours").write_text(f"{os.getpid()} {ticks}\n")
    (tmp_path / "another").write_text(f"{os.getpid()} {ticks - 1}\n")
    assert processes.pid_of("ours") == os.getpid()
    assert processes.pid_of("another") is None
    processes.stop("another")
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize(
    ("route", "said"),
    [
        ({"dst": "default", "gateway": "192.0.2.1", "dev": "eth0"}, None),
        ({"dst": "0.0.0.0/1", "dev": "tun0"}, None),
        ({"dst": "10.213.0.0/16", "dev": "muster-lab"}, None),
        ({"dst": "10.88.0.0/16", "dev": "podman0"}, None),
        ({"dst": "fd00::/64", "dev": "eth0"}, None),
        ({"dst": "10.0.0.0/8", "dev": "eth0"}, "10.0.0.0/8 by eth0"),
        ({"type": "local", "dst": "10.213.7.1", "dev": "eth1"}, "10.213.7.1/32 by eth1"),
        ({"type": "blackhole", "dst": "10.213.0.0/17"}, "10.213.0.0/17"),
    ],
)
def test_a_machine_that_has_its_addresses_already_is_told_which(
    route: dict[str, str], said: str | None
) -> None:
    assert network.overlapping([route]) == said


class MarkedLab(Kubelab):
    """A cluster that is a mark only: tests have made it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.ended = 0

    def command(self, *arguments: str, timeout_s: float = 120.0) -> str:
        assert arguments == ("down",)
        self.mark.unlink()
        self.ended += 1
        return ""

    def left_behind(self) -> list[str]:
        return []


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MarkedLab:
    made = MarkedLab(tmp_path / "made-by-tests")
    monkeypatch.setattr(claim, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(claim, "MADE_BY_TESTS", made.mark)
    # This test keeps its own time.
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: (0.0, 0.0))
    return made


def test_a_cluster_that_a_person_has_made_is_not_ended_by_tests(lab: MarkedLab) -> None:
    with claim.claimed(lab):
        pass
    assert lab.ended == 0


def test_a_cluster_that_tests_have_made_is_ended_by_the_last_that_uses_it(lab: MarkedLab) -> None:
    with claim.claimed(lab):
        with claim.claimed(lab):
            lab.mark.touch()
        assert lab.ended == 0
    assert lab.ended == 1


def test_a_cluster_of_a_session_that_was_killed_is_ended_by_the_next(lab: MarkedLab) -> None:
    lab.mark.touch()
    with claim.claimed(lab):
        assert lab.ended == 1
        lab.mark.touch()
    assert lab.ended == 2
