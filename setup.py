# SPDX-License-Identifier: Apache-2.0
"""Where an installation has its packages (``muster/__main__.py``); the rest is pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

PROGRAM = ("agent", "console", "controller", "injection", "launcher_shim", "rdzv")


def packages(*names: str) -> list[str]:
    """Return these packages with all that are in them."""
    found: list[str] = find_packages(
        include=[part for name in names for part in (name, f"{name}.*")]
    )
    return found


# pip installs muster-elastic-lib before it removes a release that had all files: so that they are
# there afterwards, they are in this package, too (docs/decisions/chart-and-release.md).
# An editable installation finds the program beside the library, in the checkout.
setup(
    packages=[*packages("muster"), *(f"muster._program.{name}" for name in packages(*PROGRAM))],
    package_dir={f"muster._program.{name}": str(Path(name)) for name in PROGRAM},
)
