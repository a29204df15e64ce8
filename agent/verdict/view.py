# SPDX-License-Identifier: Apache-2.0
"""A job as stored: the content of its keys at one revision, ready to be shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agent.verdict.clocks import sentence, skews
from agent.verdict.last_save import LastSave, last_save
from agent.verdict.runs import (
    RunView,
    Seated,
    Standstill,
    Straggler,
    runs_of,
    standstill,
    straggler,
    waits_of,
)
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.hosts import Host, host_of
from rdzv.dataclass import dataclass
from rdzv.keys import JobKeys
from rdzv.mirror import spelled
from rdzv.peers import Unreached
from rdzv.records.codec import by_last_name
from rdzv.records.job import HistoryEntry, Job, Member, shown_round
from rdzv.records.progress import CENTRAL_RUN, PodSaves
from rdzv.records.troubles import Bypass, Failure
from rdzv.sentences import duration
from rdzv.shard_ledger import ShardLedger, ShardView
from rdzv.snapshot import NO_ROUND, Listing, Places, Snapshot, first_to_go, listing_of
from rdzv.store import KeyValue

if TYPE_CHECKING:
    from launcher_shim.c10d.rounds.decision import BackOff
    from rdzv.job import JobClient

FORESEEN = "scaling down takes it first"

IN_A_ROW = 2
"""Failures in a row after which a job that trains again is still one that fails."""

FAILING_AGAIN_S = 60.0
"""Time of training, besides two starts of a world, after which the next failure would be a new one,
in seconds. Shorter: the verdict changes to and fro in a crash loop."""

FAILING_S = 600.0
"""Time after which a failure is past, in seconds: worlds take minutes to start at most."""


@dataclass(frozen=True, slots=True)
class JobView:
    """One job at one revision. ``job`` is None if no member has ever registered."""

    namespace: str
    name: str
    snapshot: Snapshot
    listing: Listing
    runs: tuple[RunView, ...]
    history: tuple[HistoryEntry, ...]
    bypasses: Mapping[str, Bypass]
    """By member: the fault of the launcher beside its sidecar."""
    saves: Mapping[str, PodSaves]
    """By member: the saves of its ranks, as reported in some round."""
    shards: Mapping[str, ShardLedger] = field(default_factory=dict)
    """By data set that is handed out in shards: its ledger."""
    failures: Mapping[str, Failure] = field(default_factory=dict)
    """By member: the newest failure of its workers."""
    unreached: Mapping[str, Unreached] = field(default_factory=dict)
    """By member: the neighbours whose sidecars it never reached."""

    @property
    def job(self) -> Job | None:
        """The job's record."""
        return self.snapshot.job

    @property
    def nodes(self) -> Mapping[str, str]:
        """The machine of each member, empty if unknown."""
        return {member.name: member.node for member in self.snapshot.members.values()}

    @property
    def in_cluster(self) -> bool:
        """Whether its members are pods, on machines with other names: kubectl may help."""
        return any(node not in ("", name) for name, node in self.nodes.items())

    def clocks(self, now_unix_s: float) -> str:
        """Say which clocks make times and ages wrong; empty if none does."""
        found = skews(self.history, now_unix_s)
        return f"{sentence(found, self.nodes)}: times are wrong by as much" if found else ""

    @property
    def places(self) -> Places:
        """The places in the run that counts."""
        return self.newest_run.places if self.newest_run else NO_ROUND

    @property
    def newest_run(self) -> RunView | None:
        """The run whose places count, as sidecars choose it; None for none, or all are closed."""
        return max(
            (run for run in self.runs if not run.round.closed),
            key=lambda run: (run.round.complete, run.round.mod_revision, run.run_id),
            default=None,
        )

    @property
    def pause(self) -> str:
        """A sentence on the pause: since when, by whom and why; empty if the job is not paused."""
        if self.job is None or not self.job.paused:
            return ""
        ignored = "" if self.snapshot.all_know_sizes else ", once no sidecar of 0.1.0 is there,"
        said = [entry for entry in self.history if entry.what == "pause"]
        if not said:
            return f"paused{ignored}"
        since, last = moment(said[-1].at_unix_s), said[-1]
        return f"paused{ignored} since {since} by {last.member}: {last.why}"

    @property
    def mute(self) -> str:
        """A sentence on the members that do not vote on saves; empty if there are none."""
        commit = self.snapshot.commit
        if commit is None or not any(commit.is_of(r.run_id, r.round.number) for r in self.runs):
            return ""
        if not commit.mute:
            return ""
        from rdzv.drain.inputs import DrainPolicy  # only here, as in back_off

        if commit.missed < DrainPolicy().tries:
            return ""
        return (
            f"{', '.join(commit.mute)} did not vote on a save ({commit.missed} votes in a row were"
            " missed): newcomers wait (see the log of its sidecar; its run directory may take no"
            " writes)"
        )

    def awaited(self, run: RunView, now_unix_s: float) -> str:
        """Describe what a forming round waits for, and since when; empty for any other round."""
        rules = self.snapshot.rules
        if run.state != "forming" or rules is None or rules.paused:
            return ""
        asking = run.places.asking
        silent = [m for m in self.listing.listed if m.slots and m.name not in asking]
        reasons = []
        least = rules.policy.smallest
        if len(asking) < least:
            reasons.append(f"{len(asking)} of at least {least} torchruns are connected")
        if silent:
            names = ", ".join(f"{m.name}{self._joined(m, now_unix_s)}" for m in silent)
            reasons.append(f"waiting for the torchrun of {names}")
        if not reasons and (wait := self.back_off(run)) is not None:
            reasons.append(wait.reason)
        return "; ".join(filter(None, reasons)) or "all ask: it begins in moments"

    def _joined(self, member: Member, now_unix_s: float) -> str:
        joins = [e for e in self.history if e.member == member.name and e.what == "join"]
        if not joins:
            return ""
        return f" (joined {duration(max(0.0, now_unix_s - joins[-1].at_unix_s))} ago)"

    @property
    def reports(self) -> Sequence[PodSaves]:
        """The reports of the pods of the world that trains, in rank order.

        Of a central launcher, which has no rounds: of the pods that have reported ranks.
        """
        run = self.newest_run
        if run is not None:
            found = (self.saves.get(seat.member) for seat in run.round.frozen)
            here = (run.run_id, run.round.number)
            seen = [one for one in found if one is not None and (one.run, one.round) == here]
            return seen if run.round.complete else []
        if not any(member.role == "launcher" for member in self.snapshot.members.values()):
            return []
        uids = {member.name: member.pod_uid for member in self.snapshot.members.values()}
        started = [one for one in self.saves.values() if one.run == CENTRAL_RUN and one.ranks]
        present = [one for one in started if uids.get(one.member) == one.pod_uid]
        return sorted(present, key=lambda one: one.ranks)

    @property
    def slow_save(self) -> str:
        """Say which pod has the least time for the saves that its world makes; empty if all do."""
        slow = [one for one in self.reports if one.too_slow]
        return min(slow, key=lambda one: one.grace_s - one.save_s).too_slow if slow else ""

    @property
    def last_save(self) -> LastSave | None:
        """The last save and the steps since, as far as known; None if nothing is."""
        run, last = self.newest_run, self.snapshot.commit_to_start_from
        if last is not None and run is not None and not last.is_of(run.run_id):
            last = None  # a run before it has its own steps
        return last_save(last, self.reports, run.round if run is not None else Round())

    @property
    def standstill(self) -> Standstill | None:
        """The cause of a world that stands still, by its stacks; None if it may be at work."""
        run = self.newest_run
        if run is None or not run.round.complete or run.round.finishing:
            return None
        commit = self.snapshot.commit
        saves = commit is not None and commit.is_of(run.run_id, run.round.number)
        if commit is not None and saves and commit.phase in ("hold", "commit", "done"):
            return None
        seats = [seat.member for seat in run.round.frozen]
        return standstill(seats, self.reports)

    @property
    def waits(self) -> Mapping[str, float]:
        """By member of the world: the share of its time that its slowest rank waits for others."""
        return waits_of(self.reports)

    @property
    def straggler(self) -> Straggler | None:
        """The ranks that the others wait for at each step; None if there are none."""
        run, told = self.newest_run, self.reports
        seats = (
            [one.member for one in told] if run is None else [s.member for s in run.round.frozen]
        )
        return straggler(seats, told)

    @property
    def steps(self) -> Mapping[str, int]:
        """By member of the world: the last step that its ranks have reported there."""
        return {one.member: one.step for one in self.reports if one.step >= 0}

    def members(self, now_unix_s: float = 0.0) -> list[tuple[Member, str, str]]:
        """Return every member with its state, the reason for it, and its launcher's fault.

        ``now_unix_s``: for the seconds that a drain still has; 0.0 to leave them out.
        """
        first, foreseen = first_to_go(self.listing), {True: FORESEEN, False: ""}
        stands = self.standstill
        causes = () if stands is None else stands.causes
        states = [
            *(
                (m, "listed", "; ".join(filter(None, (self._needed(m), foreseen[m is first]))))
                for m in self.listing.listed
            ),
            *(
                (m, "standby", "; ".join([self._held_back(m), *([FORESEEN] if m is first else [])]))
                for m in self.listing.standby
            ),
            *(
                self._excluded(self.snapshot.members[name], why, now_unix_s)
                for name, why in sorted(self.listing.excluded.items())
            ),
        ]
        return [
            (self._as_started(member), state, self._with_faults(member, why, causes))
            for member, state, why in states
        ]

    def finishes(self, member: str) -> bool:
        """Return whether first ranks of the member's round have ended well."""
        run = self.newest_run
        if run is None or not run.round.finishing:
            return False
        return any(seat.member == member for seat in run.round.frozen)

    def _needed(self, member: Member) -> str:
        quarantine = self.snapshot.quarantine_of(member)
        return f"needed for min, or it would be {quarantine.sentence}" if quarantine else ""

    def _held_back(self, member: Member) -> str:
        """Explain why ``member`` has no place, and which younger member has it, if any."""
        younger = [m.name for m in self.listing.listed if m.age_order > member.age_order]
        here = len(self.listing.listed)
        full = self.job is None or here >= self.job.policy.max_nodes
        taken = "max are listed" if full else f"{here} are listed, and the next size needs more"
        if not younger:
            return taken
        run = self.newest_run
        asks = run is not None and member.name in run.places.asking
        why = "it was there first" if asks else "no torchrun asks for one here"
        return f"{taken}: {younger[-1]} has its place, as {why}"

    def _with_faults(self, member: Member, why: str, causes: Sequence[Seated]) -> str:
        bypass, failure = self.bypasses.get(member.name), self.failures.get(member.name)
        failed = f"failed in round {shown_round(failure.round)}: {failure.brief}" if failure else ""
        stuck = [f"rank {one.rank} {one.sentence}" for pod, one in causes if pod == member.name]
        return "; ".join(filter(None, (why, bypass.sentence if bypass else "", failed, *stuck)))

    def failing(self, now_unix_s: float) -> Failure | None:
        """Return the failure that ends world after world; None if none does.

        One that has ended a single world, and another trains, is past.
        """
        run, newest = self.newest_run, None
        for one in self.failures.values():
            if newest is None or one.at_unix_s > newest.at_unix_s:
                newest = one
        if newest is None or run is None or newest.run != run.run_id:
            return None
        if now_unix_s - newest.at_unix_s > FAILING_S:
            return None
        again_s = FAILING_AGAIN_S + 2 * run.round.start_s
        formed = (one.at_unix_s for one in self.history if one.what == "round")
        since_unix_s = max((newest.at_unix_s, *formed))  # its next world may wait for minutes
        past = newest.count < IN_A_ROW or now_unix_s - since_unix_s > again_s
        return None if past and run.state == "training" else newest

    def back_off(self, run: RunView) -> BackOff | None:
        """Return the wait of the next world, if worlds fail before a step; None while one is on."""
        rules, current = self.snapshot.rules, run.round
        if rules is None or current.complete:
            return None
        # Only here: a job that trains needs none of these, and most of a command is its imports.
        from launcher_shim.c10d.rounds.decision import back_off, would_form
        from launcher_shim.c10d.rounds.inputs import RunSnapshot, run_membership

        members = run_membership(
            self.snapshot, self.listing, run.run_id, current, failures=self.failures
        )
        nodes = {node.member: node for node in run.nodes}
        here = RunSnapshot(self.snapshot.revision, current, nodes, members)
        return back_off(here, would_form(here, rules.policy), rules.policy)

    def failed(self, failure: Failure, now_unix_s: float) -> str:
        """Say who failed, with what, and how long ago."""
        ago_s = max(0.0, now_unix_s - failure.at_unix_s)
        return f"{failure.member} failed {duration(ago_s)} ago: {failure.brief}"

    def _as_started(self, member: Member) -> Member:
        """Return ``member`` with the workers that its torchrun started, if that is known."""
        bypass = self.bypasses.get(member.name)
        return replace(member, slots=bypass.slots) if bypass and bypass.slots else member

    def _excluded(self, member: Member, why: str, now_unix_s: float) -> tuple[Member, str, str]:
        drain = self.snapshot.drains.get(member.pod_uid)
        if drain is None:
            quarantined = member.name in self.listing.quarantined
            return member, "quarantined" if quarantined else "excluded", why
        from rdzv.drain.standing import phase_of  # only here, as in back_off

        phase = phase_of(self.snapshot, drain, finishing=self.finishes(member.name))
        left_s = drain.left_s(now_unix_s) if now_unix_s and not phase.outcome else None
        left = "" if left_s is None else f"; {left_s:.0f} s to its deadline"
        return (
            member,
            "drained" if phase.outcome else "draining",
            f"{drain.reason}: {phase.sentence}{left}",
        )

    def hosts(self) -> list[tuple[Host, Member]]:
        """Return the hosts that a central launcher may use, each with its member."""
        listed = map(self._as_started, listing_of(self.snapshot).listed)
        pairs = ((host_of(member), member) for member in listed)
        return [(host, member) for host, member in pairs if host is not None]


def view_of(keys: JobKeys, snapshot: Snapshot, kvs: Iterable[KeyValue]) -> JobView:
    """Build the view from a job's membership and its other keys; omit unreadable records."""
    kvs = tuple(kv for kv in kvs if spelled(kv.key[len(keys.prefix) :]))
    generation = keys.in_generation(snapshot.job.generation if snapshot.job else 1)
    runs, sets = runs_of(generation, kvs), ShardView(keys, kvs)
    history = by_last_name(kvs, keys.history, HistoryEntry.from_kv)
    view = JobView(
        keys.namespace,
        keys.job_name,
        snapshot,
        Listing(snapshot.revision),
        runs,
        tuple(sorted(history.values(), key=lambda entry: entry.revision)),
        by_last_name(kvs, generation.bypasses, Bypass.from_kv),
        by_last_name(kvs, generation.saves, PodSaves.from_kv),
        {name: sets.ledger(name) for name in sets.names},
        by_last_name(kvs, generation.failures, Failure.from_kv),
        by_last_name(kvs, generation.unreached, Unreached.from_kv),
    )
    return replace(view, listing=listing_of(snapshot, view.places))


def present_view(client: JobClient) -> JobView:
    """Return the job as the mirror has it now."""
    return view_of(client.keys, client.membership.snapshot(), client.mirror.kvs.values())


def moment(unix_s: float) -> str:
    """Format a Unix time in UTC as ISO 8601, to the second."""
    spelt = datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
    return spelt.replace("+00:00", "Z")
