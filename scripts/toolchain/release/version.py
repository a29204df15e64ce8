# SPDX-License-Identifier: Apache-2.0
"""One version in all places that say it, and what keeps a release from being made. Pure.

``muster/__init__.py`` has the version; the other places have to agree with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

SOURCE = "muster/__init__.py"
CHART = "charts/muster/Chart.yaml"
CHANGELOG = "CHANGELOG.md"
DIRTY_SHOWN = 3

_ASSIGNED = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_VERSION = re.compile(r"(\d+\.\d+\.\d+)(?:(rc|\.dev)(\d+))?", re.ASCII)
_HEADING = re.compile(r"^## (\d+\.\d+\.\d+) \((unreleased|\d{4}-\d\d-\d\d)\)$", re.MULTILINE)
_IMAGE = re.compile(r"muster-(?:sidecar|controller):(\d[\w.-]*\w)")


def version_in(source: str) -> str:
    """The version that ``muster/__init__.py`` assigns."""
    (found,) = _ASSIGNED.findall(source)
    return str(found)


def chart_version(version: str) -> str:
    """The same as semantic versioning writes it, which helm wants: 0.2.0.dev0 is 0.2.0-dev.0."""
    base, kind, number = _parts(version)
    return f"{base}-{kind.strip('.')}.{number}" if kind else base


def final(version: str) -> str:
    """The release that this is, or is on the way to."""
    return _parts(version)[0]


def is_final(version: str) -> bool:
    """Whether it is that release itself."""
    return version == final(version)


def disagreements(version: str, texts: Mapping[str, str]) -> Iterator[str]:
    """Say of each place that another version is there; ``texts`` by path.

    Images in examples are those of the release. Before it they may be of one that is out.
    """
    chart = texts[CHART]
    wanted = {"version": chart_version(version), "appVersion": version}
    for key, value in wanted.items():
        found = re.search(rf"^{key}: (\S+)$", chart, re.MULTILINE)
        if found is None or found[1] != value:
            yield f"{CHART}: {key} is {found and found[1]}, make it {value}"
    out = set(released(texts[CHANGELOG])) if not is_final(version) else set()
    for path, text in sorted(texts.items()):
        if path == CHANGELOG:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for tag in _IMAGE.findall(line):
                if tag != final(version) and tag not in out:
                    yield f"{path}:{number}: an image of {tag}, make it {final(version)}"


def released(changelog: str) -> list[str]:
    """Versions whose heading has a date."""
    return [version for version, when in _HEADING.findall(changelog) if when != "unreleased"]


def refusals(
    version: str,
    changelog: str,
    tags: Collection[str],
    changed: Sequence[str],
    *,
    dry_run: bool,
) -> Iterator[str]:
    """Say each thing that keeps this version from being released, with what to do.

    ``changed``: paths that are not as the commit has them. ``dry_run``: a version that is still
    being worked on will do, and a heading without its date.
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
