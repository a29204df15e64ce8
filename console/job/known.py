# SPDX-License-Identifier: Apache-2.0
"""The jobs that a store has, and the error for one that it does not have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from console.help import near
from rdzv.errors import JobNotFound, StoreError
from rdzv.keys import ROOT, JobKeys, job_of
from rdzv.store import Store

JOBS_MAX = 1000
"""The most reads that look for jobs: each finds one at most."""

HINT_TIMEOUT_S = 1.0
"""Time for a hint at another name: the error is right without it."""

NAMED_MAX = 5
"""The most jobs to name in an error."""


async def jobs_in(store: Store, *, namespace: str | None = None, timeout_s: float) -> list[JobKeys]:
    """Return the jobs of the store, or of a namespace, by namespace and name.

    Returns the first ones if there are more than ``JOBS_MAX``. Raises ``StoreError``.
    """
    found: list[JobKeys] = []
    prefix = JobKeys(namespace, "_").prefix.removesuffix("_/") if namespace else ROOT
    after = ""
    for _ in range(JOBS_MAX):
        page = await store.page(prefix, limit=1, after=after, timeout_s=timeout_s)
        if not page.kvs:
            break
        key = page.kvs[0].key
        if (parsed := job_of(key)) is None:
            after = key
            continue
        found.append(parsed[0])
        # All of its keys follow its prefix, which ends with "/"; "0" is the next character.
        after = f"{parsed[0].prefix[:-1]}0"
    return sorted(found, key=lambda keys: (keys.namespace, keys.job_name))


async def not_found(store: Store, wanted: JobKeys, *, or_else: str = "") -> JobNotFound:
    """Return the error for a job that the store does not have, with the name that was meant."""
    try:
        async with asyncio.timeout(HINT_TIMEOUT_S):
            known = await jobs_in(store, timeout_s=HINT_TIMEOUT_S)
    except (StoreError, TimeoutError):
        known = []  # the user may read one job alone, or the store is slow
    return JobNotFound(f"{missing(wanted)}: {meant(wanted, known)}{or_else}")


def missing(wanted: JobKeys) -> str:
    """Say that the store does not have a job."""
    return f"the store has no job {wanted.job_name} in namespace {wanted.namespace}"


def meant(wanted: JobKeys, known: Iterable[JobKeys]) -> str:
    """Return a hint at the job that was probably meant: pure."""
    known = tuple(known)
    elsewhere = [keys.namespace for keys in known if keys.job_name == wanted.job_name]
    if elsewhere:
        return f"there is one in namespace {elsewhere[0]}: add -n {elsewhere[0]}"
    here = [keys.job_name for keys in known if keys.namespace == wanted.namespace]
    if close := near(wanted.job_name, here):
        return f"did you mean {close}?"
    everywhere = {keys.job_name: keys for keys in known}
    if close := near(wanted.job_name, everywhere):
        return f"did you mean {close} in namespace {everywhere[close].namespace}?"
    if not known:
        return "see whether its pods have started, and have the sidecar"
    names = [f"{keys.namespace}/{keys.job_name}" for keys in known]
    more = len(names) - NAMED_MAX
    rest = f" and {more} more: muster list" if more > 0 else ""
    return f"it has {', '.join(names[:NAMED_MAX])}{rest}"
