# SPDX-License-Identifier: Apache-2.0
"""The glossary has the words that the pages use, and the keys that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rdzv.keys import JobKeys

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")

TERMS = {
    "acknowledgement", "ambiguous", "backoff", "boundary", "cell", "closed", "commit",
    "compaction", "compare", "complete", "cut", "delisted", "drain", "epoch", "eviction",
    "expired", "fenced", "gate", "generation", "grace", "grant", "hold", "incarnation", "jitter",
    "job", "lapsed", "launcher", "lease", "listed", "lost", "member", "mirror", "node", "notice",
    "place", "progress", "quarantine", "quorum", "rank", "relay", "release", "reserve",
    "revision", "round", "run", "seat", "sidecar", "slots", "snapshot", "stage", "stale",
    "standby", "store", "view", "void", "vote", "worker", "world",
}  # fmt: skip

PAGES = (
    "README.md",
    "docs/README.md",
    "docs/drain.md",
    "docs/operations.md",
    "docs/protocol.md",
    "docs/sidecar.md",
)
"""Those on which a reader first meets the words."""


def keys() -> set[str]:
    """The keys of a job, below its prefix, with the names that the pages give their parts."""
    job = JobKeys("namespace", "job")
    life = job.in_generation(7)
    run = life.run("RUN")
    spelled = [
        job.job,
        job.last_commit,
        job.incarnation("MEMBER"),
        life.prefix,
        life.member("MEMBER"),
        life.drain("POD"),
        life.commit,
        life.vote(99, "MEMBER"),
        life.bypass("MEMBER"),
        life.failure("MEMBER"),
        life.pod_saves("MEMBER"),
        life.quarantine("MEMBER"),
        run.prefix,
        run.round,
        run.node("MEMBER"),
    ]
    below = " ".join(key.removeprefix(job.prefix) for key in spelled)
    below = below.replace("/7", "/<G>").replace("/99", "/<epoch>").replace("POD", "<pod_UID>")
    below = below.replace("RUN", "<run>").replace("MEMBER", "<member>")
    return {key.replace("_UID", " UID") for key in below.split()}


def test_every_key_that_the_glossary_names_is_one_of_the_store() -> None:
    named = {*re.findall(r"`((?:g/<G>/|incarnations/|last_commit|job)[^`]*)`", GLOSSARY)}
    assert named
    assert named - keys() == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_links_to_the_glossary_once(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(re.findall(r"\]\((?:docs/)?glossary\.md\)", text)) == 1


def test_the_glossary_explains_each_term_and_no_word_twice() -> None:
    words = re.findall(r"\*\*([\w -]+)\*\*", GLOSSARY)
    assert sorted(words) == sorted({*words})
    assert TERMS - {*words} == set()
