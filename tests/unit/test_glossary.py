# SPDX-License-Identifier: Apache-2.0
"""The keys that the glossary names are those of the store; none of its words is there twice."""

from __future__ import annotations

import re
from pathlib import Path

from rdzv.keys import JobKeys

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


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


def test_the_glossary_explains_no_word_twice() -> None:
    words = re.findall(r"\*\*([\w -]+)\*\*", GLOSSARY)
    assert sorted(words) == sorted({*words})
