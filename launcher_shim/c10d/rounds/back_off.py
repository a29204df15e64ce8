# SPDX-License-Identifier: Apache-2.0
"""The wait before the next world of a job that cannot start: pure, the same in every sidecar.

A world that all its nodes leave by a failure forms again within seconds. Where a script cannot
start at all, that repeats for ever, and hides its own cause. So after a few worlds in a row that
failed before their first step, the next one waits, each time for longer. There is no wait if a
world without the nodes that failed can form: the quarantine decides which one that is.

The row is counted in the round key, by whoever opens the next round. Who failed is on record.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher_shim.c10d.rounds.inputs import RunSnapshot
from launcher_shim.c10d.rounds.observations import RoundObservations
from launcher_shim.c10d.rounds.records import LOST, Node, Round
from rdzv.dataclass import dataclass
from rdzv.records.quarantine import DOUBLINGS_MAX, TERMS
from rdzv.records.sizes import Sizes

FREE_STARTS = 3
"""Number of failed starts in a row before the first wait. Fewer: what a second try mends waits,
too. More: more starts in vain, and more lines in each log."""

FIRST_S = 20.0
"""The first wait; each is twice as long as the one before, until a world forms without one."""

LONGEST_S = 300.0
"""Upper bound of the wait. Longer than this, a torchrun whose join has a time-out (600 s unless
``--rdzv-conf`` says otherwise) could give up. Shorter: more starts in vain."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """A wait since the round was opened, and ``why``, the end of a sentence; 0.0 for none.

    ``alike``: whether all have failed with one error. ``member``: whose sidecar writes it to the
    history.
    """

    wait_s: float = 0.0
    why: str = ""
    alike: bool = False
    member: str = ""

    @property
    def reason(self) -> str:
        """The wait in one sentence; empty for none."""
        return f"waits {self.wait_s:g} s {self.why}" if self.why else ""

    def left(self, left_s: float) -> str:
        """Say it with the time that is left of it."""
        return f"waits {self.wait_s:g} s ({left_s:.0f} s left) {self.why}"


NO_WAIT = BackOff()


def failed_starts(now: float, current: Round, observations: RoundObservations) -> int:
    """Return how many worlds in a row have failed before their first step, once this one is over.

    It is 0 if nobody here saw how long the world lasted: a try too many costs little.
    """
    if current.progress == "steps" or current.finishing or not observations.saw_it_form:
        return 0
    if current.ends and not current.ends.startswith(LOST):
        return current.failed_starts
    lasted_s = min(now, observations.ending_since_s) - observations.formed_s
    if current.progress != "loads" and lasted_s >= max(TERMS.brief_s, current.start_s):
        return 0
    return current.failed_starts + 1


def back_off(snapshot: RunSnapshot, chosen: Sequence[Node], sizes: Sizes) -> BackOff:
    """Decide how long the next world, which ``chosen`` would form, waits.

    A node that is new in it, and a change of the job's record, end the wait.
    """
    current, members = snapshot.round, snapshot.membership
    failures = [members.failed[node.member] for node in chosen if node.member in members.failed]
    if current.failed_starts < FREE_STARTS or not failures or any(map(_is_new, chosen)):
        return NO_WAIT
    if members.job_revision > current.mod_revision or _can_do_without(snapshot, chosen, sizes):
        return NO_WAIT
    wait_s = min(LONGEST_S, FIRST_S * 2.0 ** min(current.waits, DOUBLINGS_MAX))
    newest = max(failures, key=lambda one: (one.round, -one.mod_revision))
    row = f"{current.failed_starts} worlds in a row failed before a step was reported"
    what = f"{row}, the last by {newest.member}"
    alike = len(failures) == len(chosen) and len({(one.kind, one.where) for one in failures}) == 1
    if alike:
        what = f"all failed alike before a step was reported, {current.failed_starts} times"
    return BackOff(
        wait_s,
        f"before round {current.shown}: {what}: {newest.brief_error};"
        " a new pod or muster resume ends the wait",
        alike,
        newest.member,
    )


def _is_new(node: Node) -> bool:
    """Return whether the node's pod has been in no world yet."""
    return node.ask == 1


def _can_do_without(snapshot: RunSnapshot, chosen: Sequence[Node], sizes: Sizes) -> bool:
    """Return whether a world without the nodes that failed can form, or is about to."""
    members, former = snapshot.membership, frozenset(snapshot.round.former)
    if members.quarantined & former.difference(node.member for node in chosen):
        return True
    coming = [one.member for one in snapshot.nodes.values() if one.left_reason == "exit"]
    there = former.union(coming, (one.member for one in snapshot.asking())) - members.quarantined
    sound = [one for one in there if members.may_join(one) and one not in members.failed]
    return sizes.largest(len(sound)) > 0
