# SPDX-License-Identifier: Apache-2.0
"""Builds the site in a folder: python -m docs_site FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from docs_site.building import build
from docs_site.links import broken

REPOSITORY = Path(__file__).parents[3]


def main() -> int:
    """Build and check the site; return the exit status."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m docs_site FOLDER\n")
        return 2
    site = Path(sys.argv[1]).absolute()
    if not build(REPOSITORY, site):
        return 1
    lost = broken(site)
    for link in lost:
        sys.stderr.write(f"{link}\n")
    if lost:
        return 1
    sys.stdout.write(f"The site is in {site}: open {site / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
