# SPDX-License-Identifier: Apache-2.0
"""A new setting of a job's policy is one field, and the decision that reads it: nothing between."""

from __future__ import annotations

import re
import subprocess
import sys

from rdzv.records.policy import POLICY_TABLE
from tests.support.sources import ROOT, relative, sources

POLICY = "rdzv/records/policy.py"
FILES_MAX = 6
"""The most product files that may name one setting of the policy."""

FIELD = """
    patience_s: Seconds = _policy(
        Setting("--patience", texts.duration_s(0, 60), "5s", "TIME", "How long to be patient."),
        "patience_s",
        0.0,
        inject={"why": "Patience.", "otherwise": "5s"},
        change={"why": "Patience."},
        local={"why": "Patience.", "default": "1s"},
    )

    def largest("""

WALK = """
import sys, types
module = types.ModuleType("rdzv.records.policy")
module.__file__ = "policy.py"
sys.modules["rdzv.records.policy"] = module
exec(compile(sys.stdin.read(), "policy.py", "exec"), module.__dict__)

from agent.config import Config
from agent.surroundings import identity_of
from console.job import by_hand
from console.local.command import local
from injection.settings import told
from injection.sidecar import VARIABLES, variables_of
from launcher_shim.c10d.generation import Generation
from rdzv.members.registration import plan
from rdzv.records.job import Job, change_between
from rdzv.settings import load
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue
from types import SimpleNamespace
from functools import partial
from launcher_shim.c10d.rounds.inputs import RoundPolicy

flags = {"job": "j", "min_nodes": "1", "max_nodes": "4", "patience_s": "7s"}
identity = identity_of(load(Config, flags, {}), "uid", "0.2.0", "")
registered = plan(Snapshot(5, None), identity, None, empty_for_s=0, lease_ttl_s=10)
assert registered.member.template.endswith(" patience=7s"), registered.member
value = registered.job.to_json()
assert b'"patience_s":7.0' in value, value
job = Job.from_kv(KeyValue("/muster/v1/job", value, 1, 1, 1, 0))
assert job.policy == identity.policy
after = by_hand.Wanted({"patience_s": 9.0}).of(job)
assert change_between(job, after) == "patience is 9s (before: 7s)", change_between(job, after)
seen = Snapshot(6, job)
generation = SimpleNamespace(
    _client=SimpleNamespace(membership=SimpleNamespace(snapshot=lambda: seen)),
    _registrar=SimpleNamespace(identity=identity),
    _made=None,
    _make_policy=partial(RoundPolicy, first_call_s=1.0),
)
assert Generation._policy(generation).patience_s == 7.0
for command in (by_hand.set_values, local):
    assert "--patience" in {flag for one in command.params for flag in one.opts}, command
kept = told({"patience_s": "3s"}, {}, {})
assert kept.annotations == {"muster.dev/patience": "3s"}, kept.annotations
assert variables_of(kept.settings.policy)["MUSTER_PATIENCE"] == "3s"
assert "MUSTER_PATIENCE" in VARIABLES  # so that it is taken out again
"""


def test_a_field_alone_comes_from_the_flag_to_the_decision() -> None:
    text = (ROOT / POLICY).read_text()
    assert "    def largest(" in text
    text = text.replace("\n    def largest(", FIELD, 1)
    done = subprocess.run(
        [sys.executable, "-c", WALK], input=text, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_few_files_name_a_setting() -> None:
    naming = [relative(path) for path in sources() if re.search(r"\bgather_s\b", path.read_text())]
    assert POLICY in naming
    assert len(naming) <= FILES_MAX, naming


def test_the_pages_on_the_policy_name_every_setting() -> None:
    names = [one.flag for one in POLICY_TABLE.values()]
    rows = (ROOT / "docs/policy.md").read_text().splitlines()
    assert [one for one in names if not any(f"| `{one}`" in row for row in rows)] == []
    for page in ("operations.md", "glossary.md"):
        (told,) = re.findall(r"`min`, `max`[^.)]*", (ROOT / "docs" / page).read_text())
        assert re.findall(r"`(\w+)`", told) == [one.removeprefix("--") for one in names], page
