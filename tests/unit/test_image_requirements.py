# SPDX-License-Identifier: Apache-2.0
"""What the images install is what is needed, at the versions that are tested."""

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
