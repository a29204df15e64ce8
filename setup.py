# SPDX-License-Identifier: Apache-2.0
"""Where an installation has its packages (``muster/__main__.py``); the rest is pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

PROGRAM = ("agent", "console", "controller", "injection", "launcher_shim", "rdzv")

program = find_packages(include=[pattern for name in PROGRAM for pattern in (name, f"{name}.*")])
# An editable installation finds the program beside the library, in the checkout.
setup(
    packages=["muster", "muster.data", *(f"muster._program.{name}" for name in program)],
    package_dir={f"muster._program.{name}": str(Path(name)) for name in PROGRAM},
)
