# SPDX-License-Identifier: Apache-2.0
"""The version in all places that have it, and the reasons that block a release. Pure.

``muster/__init__.py`` has the version; the other places must agree with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

SOURCE = "muster/__init__.py"
CHART = "charts/muster/Chart.yaml"
PROJECT = "pyproject.toml"
CHANGELOG = "CHANGELOG.md"
DIRTY_SHOWN = 3

_ASSIGNED = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_VERSION = re.compile(r"(\d+\.\d+\.\d+)(?:(rc|\.dev)(\d+))?", re.ASCII)
_HEADING = re.compile(r"^## (\d+\.\d+\.\d+) \((unreleased|\d{4}-\d\d-\d\d)\)$", re.MULTILINE)
_IMAGE = re.compile(r"muster-(?:sidecar|controller):(\d[\w.-]*\w)")


def version_in(source: str) -> str:
    """Return the version that ``muster/__init__.py`` assigns."""
    (found,) = _ASSIGNED.findall(source)
    return str(found)


def chart_version(version: str) -> str:
    """Return the version as semantic versioning, for helm: 0.2.0.dev0 becomes 0.2.0-dev.0."""
    base, kind, number = _parts(version)
    return f"{base}-{kind.strip('.')}.{number}" if kind else base


def final(version: str) -> str:
    """Return the release that this version is or leads to."""
    return _parts(version)[0]


def is_final(version: str) -> bool:
    """Return whether the version is a final release."""
    return version == final(version)


def disagreements(version: str, texts: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each place with another version; ``texts`` are by path.

    Images in examples must be those of the release, or, before it is out, of an earlier one.
    """
    chart = texts[CHART]
    wanted = {"version": chart_version(version), "appVersion": version}
    for key, value in wanted.items():
        found = re.search(rf"^{key}: (\S+)$", chart, re.MULTILINE)
        if found is None or found[1] != value:
            yield f"{CHART}: {key} is {found and found[1]}, make it {value}"
    library = re.search(r'"muster-elastic-lib==([^"]+)"', texts[PROJECT])
    if library is None or library[1] != version:
        yield f"{PROJECT}: muster-elastic-lib is {library and library[1]}, make it {version}"
    out = set(released(texts[CHANGELOG])) if not is_final(version) else set()
    for path, text in sorted(texts.items()):
        if path == CHANGELOG:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for tag in _IMAGE.findall(line):
                if tag != final(version) and tag not in out:
                    yield f"{path}:{number}: an image of {tag}, make it {final(version)}"


def released(changelog: str) -> list[str]:
    """Return the versions whose heading has a date."""
    return [version for version, when in _HEADING.findall(changelog) if when != "unreleased"]


def refusals(
    version: str,
    changelog: str,
    tags: Collection[str],
    changed: Sequence[str],
    *,
    dry_run: bool,
) -> Iterator[str]:
    """Yield each fault that blocks the release of this version, with its remedy.

    ``changed``: paths that differ from the commit. ``dry_run``: accept a version that is still in
    development, and a heading without a date.
    """
    if changed:
        more = f" and {len(changed) - DIRTY_SHOWN} more" if len(changed) > DIRTY_SHOWN else ""
        shown = ", ".join(changed[:DIRTY_SHOWN])
        yield f"{shown}{more}: not as the commit has it: commit it, or take it away"
    headings = dict(_HEADING.findall(changelog))
    when = headings.get(final(version))
    if when is None:
        yield f"{CHANGELOG} has no section {final(version)}: write '## {final(version)} (DATE)'"
    if f"v{final(version)}" in tags:
        yield f"the tag v{final(version)} is there: raise __version__ in {SOURCE}"
    if not dry_run:
        if not is_final(version):
            yield f"{SOURCE} says {version}: make it {final(version)}, or say --dry-run"
        if when == "unreleased":
            yield f"{CHANGELOG}: the section {final(version)} has no date: give it one"


def _parts(version: str) -> tuple[str, str, str]:
    found = _VERSION.fullmatch(version)
    if found is None:
        raise ValueError(f"{version!r} is no version such as 0.2.0, 0.2.0rc1 or 0.2.0.dev0")
    return found[1], found[2] or "", found[3] or ""
