# SPDX-License-Identifier: Apache-2.0
"""The packages of the extra ``controller``, which commands about a cluster need."""

from __future__ import annotations

PACKAGES = frozenset({"aiohttp", "kubernetes", "yaml"})
"""The names by which they are imported."""


def missing(error: ModuleNotFoundError) -> str:
    """Return what to install if the import of one of them has failed; empty for any other."""
    package = (error.name or "").partition(".")[0]
    if package not in PACKAGES:
        return ""
    return (
        f"the cluster cannot be asked without the package {package}: pip install"
        " 'muster-elastic[controller]'"
    )
