# SPDX-License-Identifier: Apache-2.0
"""What the sidecar's image installs is what the project needs, at the versions that are tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


def test_every_dependency_is_installed_at_the_version_that_the_tests_have() -> None:
    image = pinned("sidecar-requirements.txt")
    assert {name_of(each) for each in PROJECT["project"]["dependencies"]} <= image.keys()
    tested = {}
    for name in ("constraints.txt", "constraints-tools.txt"):
        for line in (ROOT / "scripts" / name).read_text().splitlines():
            project, _, version = line.partition("==")
            tested[name_of(project)] = version
    assert image == {name: tested[name] for name in image}


@pytest.mark.parametrize("requirement", PROJECT["build-system"]["requires"])
def test_the_build_has_what_builds_the_project(requirement: str) -> None:
    version = pinned("sidecar-build-requirements.txt")[name_of(requirement)]
    least, _, limit = requirement.partition(">=")[2].partition(",<")
    assert int(least) <= int(version.split(".")[0]) < int(limit)
