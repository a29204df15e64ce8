# SPDX-License-Identifier: Apache-2.0
"""A refusal of Kubernetes for want of rights, in one sentence for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rdzv.errors import ClusterRefused

FORBIDDEN = 403


@contextmanager
def with_right(command: str, right: str, namespace: str | None) -> Iterator[None]:
    """Raise a refusal for want of rights again, as a sentence that names what to ask for.

    ``right``: a verb and a resource, as in ``create pods/exec``. ``namespace`` None: of all.
    """
    try:
        yield
    except ClusterRefused as error:
        if error.status != FORBIDDEN:
            raise
        raise ClusterRefused(forbidden(command, right, namespace, str(error)), FORBIDDEN) from error


def forbidden(command: str, right: str, namespace: str | None, error: str) -> str:
    """Return the sentence; ``error``: its text, with what Kubernetes says at its end."""
    where = "all namespaces" if namespace is None else f"namespace {namespace}"
    said = error.partition(f"with {FORBIDDEN}: ")[2] or error
    return (
        f"{command} may not {right} in {where}: ask for that right, as in"
        f" docs/verbs.md#rights (Kubernetes: {said})"
    )
