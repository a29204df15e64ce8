# SPDX-License-Identifier: Apache-2.0
"""The host list of ``horovodrun --host-discovery-script``, from the listing: pure.

A host is one pod, not one registration: it is named by member and pod UID. So a member that was cut
off and registers again keeps its name, and with it its workers; a new pod of the same name has a
name that no blacklist contains.

A member that leaves, drains or changes its job is removed from the list at once. One whose lease
has expired is removed once a healthy watch has missed it for ``CONFIRM_S`` and the store, read
after that, has no record of it, and never as the last one: after a cut between all pods and the
store, all come back.

Horovod hands the training state from hosts that it uses to new ones, and ends a job in which none
of the previous hosts is left. So if all are replaced at once, the oldest stays on the list until
one of the others has been on it for ``SETTLE_S``. If all drain and no new one has come yet, the
oldest stays, too, for as long as it is there.

The last line, ``rev-<N>:0``, is a host without slots. It is renamed with each change, so that
Horovod sees an added host in every change: after a change that only removes hosts, workers skip the
sync that a new worker waits for. Horovod notifies its workers of a change once, and a worker that
is being reset loses it. Horovod does not report which workers have followed, so the line is renamed
repeatedly, at growing intervals; once all have followed, that has no effect.

While the job is paused, that line is all that is printed: horovodrun waits for hosts, and so do its
workers, with the training state in their memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import field, replace
from hashlib import sha256

from rdzv.dataclass import dataclass
from rdzv.records.job import Member
from rdzv.snapshot import Listing, Places

CONFIRM_S = 4.0
"""Time for which a host's record must be away before the host is dropped: a reconnect and a renewal
of its lease fit in."""

SETTLE_S = 15.0
"""Time for which a new host must be listed before an old one may go: horovodrun polls the list, the
workers reach their next commit, and all of them gather."""

NUDGE_S = 2.0
"""Minimum time between two nudges; horovodrun polls about every 1.4 s."""

NUDGE_SHARE = 8
"""A nudge comes within this fraction (one eighth) of the time since the change, or ``NUDGE_S``.
Horovod never forgets a name that it has seen: this way it sees about 90 of them in a week without a
change."""

_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\.([0-9a-f]{8}):([1-9][0-9]{0,5})", re.ASCII)
_REVISION = re.compile(r"rev-([0-9]{1,19}):0", re.ASCII)


@dataclass(frozen=True, slots=True)
class Host:
    """One line of the list; ``token`` is the host's name, ``revision`` the record's."""

    token: str
    member: str
    slots: int
    revision: int = 0


def host_of(member: Member) -> Host | None:
    """Return the host of ``member``; None if its name could not go into a shell line."""
    if not _TOKEN.fullmatch(member.name):
        return None
    token = token_of(member.name, member.pod_uid)
    return Host(token, member.name, member.slots, member.mod_revision)


def token_of(member: str, pod_uid: str) -> str:
    """Return the name of a pod to the launcher."""
    return f"{member}.{sha256(pod_uid.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class HostList:
    """The hosts, oldest first.

    ``missed_since_s`` is when the record of a lost host vanished, ``listed_since_s`` when each host
    came, ``changed_s`` when a host changed last, and ``renamed_s`` when the last line did. ``kept``
    is the token of a host that stays only to hand the training state over. ``former`` is the host
    that would stay, while there is none at all: its workers wait for others. ``hidden``: whether
    none is printed.
    """

    hosts: tuple[Host, ...] = ()
    revision: int = 0
    generation: int = 0
    missed_since_s: Mapping[str, float] = field(default_factory=dict)
    listed_since_s: Mapping[str, float] = field(default_factory=dict)
    kept: str = ""
    former: Host | None = None
    hidden: bool = False
    changed_s: float = 0.0
    renamed_s: float = 0.0

    def render(self) -> str:
        """Render the content of the file."""
        hosts = () if self.hidden else self.hosts
        lines = [f"{host.token}:{host.slots}\n" for host in hosts]
        return "".join([*lines, f"rev-{self.revision}:0\n"])

    def places(self, able: Iterable[Member], room: int) -> Places:
        """Return the members of ``able``, oldest first, that keep their line against an older one.

        If there is not ``room`` for all, those that have been listed for longest: the others have
        filled in for one that was away for a moment. A list that is read back does not have these
        times; then the oldest, as in the others' lists.
        """
        ages = {token_of(member.name, member.pod_uid): age for age, member in enumerate(able)}
        hosts = [host for host in self.hosts if host.token in ages]
        hosts.sort(key=lambda host: (self.listed_since_s[host.token], ages[host.token]))
        return Places(frozenset(host.member for host in hosts[:room]))

    def next_check_s(self, after_s: float = -math.inf) -> float | None:
        """Return when, after ``after_s``, to call ``follow`` again without a change; or None."""
        checks = [since_s + CONFIRM_S for since_s in self.missed_since_s.values()]
        if self.kept:
            others = (host.token for host in self.hosts if host.token != self.kept)
            since_s = (self.listed_since_s[token] for token in others)
            checks.append(min(since_s, default=math.inf) + SETTLE_S)
        return min((check_s for check_s in checks if after_s < check_s < math.inf), default=None)

    def without(self, left: Callable[[Host], bool], now: float) -> HostList:
        """Return the same list without the hosts that ``left``; one stays if all have.

        ``follow`` adds the hosts that have come in their place.
        """
        staying = tuple(host for host in self.hosts if not left(host)) or self.hosts[:1]
        if staying == self.hosts:
            return self
        since_s = {host.token: self.listed_since_s[host.token] for host in staying}
        return replace(
            self,
            hosts=staying,
            listed_since_s=since_s,
            revision=self.revision + 1,
            changed_s=now,
            renamed_s=now,
        )

    def hiding(self, hidden: bool, now: float) -> HostList:
        """Return the same hosts, none of them printed if ``hidden``."""
        if hidden == self.hidden:
            return self
        return replace(
            self, hidden=hidden, revision=self.revision + 1, changed_s=now, renamed_s=now
        )

    def overdue(self, now: float) -> bool:
        """Return whether a host has been missing for so long that only a read is due.

        The event of its return may be unread, if this sidecar or its stream was suspended.
        """
        return any(now - since_s >= CONFIRM_S for since_s in self.missed_since_s.values())

    def next_nudge_s(self) -> float:
        """Return when to rename the last line even if nothing changes."""
        return self.renamed_s + max(NUDGE_S, (self.renamed_s - self.changed_s) / NUDGE_SHARE)

    def nudged(self, now: float) -> HostList:
        """Return the same hosts, the last line renamed if that is due; ``now`` is monotonic."""
        if now < self.next_nudge_s():
            return self
        return replace(self, revision=self.revision + 1, renamed_s=now)


def follow(
    previous: HostList,
    listing: Listing,
    generation: int,
    *,
    left: Callable[[Host], bool],
    now: float,
    healthy_for_s: float,
    heard_s: float,
    outdated: Callable[[Host], bool] = lambda host: False,
) -> HostList:
    """Return the next host list, with the last line of ``previous`` if no host changes.

    ``left``: whether a lost host drains, or left on purpose after its record was made. ``now`` is
    monotonic; ``healthy_for_s`` is for how long the watch has had no gap. ``heard_s``: the listing
    has everything up to that time; an ``overdue`` host is dropped only by that. ``outdated``:
    whether the record of a host's name is that of an earlier pod, which a restored store has
    brought back: then the host is kept.
    """
    listed = [host for host in map(host_of, listing.listed) if host is not None]
    missed: dict[str, float] = {}
    lost: list[Host] = []
    if generation == previous.generation:
        present = {host.token for host in listed}
        unlisted = {member.name for member in listing.standby} | set(listing.excluded)
        names = {host.member for host in listed} | unlisted
        gone = [
            host
            for host in previous.hosts
            if host.token not in present
            and (host.member not in names or outdated(host))
            and not left(host)
        ]
        for host in gone:
            # Time in which the watch would not have shown a return does not count.
            blind_until_s = now - healthy_for_s if listed else now
            since = max(previous.missed_since_s.get(host.token, now), blind_until_s)
            if min(now, heard_s) - since < CONFIRM_S:
                missed[host.token] = since
                lost.append(host)
    hosts = (*lost, *listed)
    kept = former = None
    if generation == previous.generation:
        kept = _kept_of(previous, hosts, listing.excluded, now)
        if kept is not None and (hosts or kept.member in listing.excluded):
            hosts = (kept, *hosts)
        else:
            kept, former = None, kept
    remembered = hosts if former is None else (former,)
    since_s = {host.token: previous.listed_since_s.get(host.token, now) for host in remembered}
    following = replace(
        previous,
        hosts=hosts,
        missed_since_s=missed,
        listed_since_s=since_s,
        kept=kept.token if kept is not None else "",
        former=former,
    )
    if _lines(hosts) == _lines(previous.hosts) and generation == previous.generation:
        return following
    revision = max(listing.revision, previous.revision + 1)
    return replace(
        following, revision=revision, generation=generation, changed_s=now, renamed_s=now
    )


def _kept_of(
    previous: HostList, hosts: Iterable[Host], excluded: Container[str], now: float
) -> Host | None:
    """Return the host that stays because none that Horovod certainly uses would.

    If no host is left at all, prefer one that is still there.
    """
    tokens = {host.token for host in hosts}
    before = previous.hosts if previous.former is None else (previous.former,)
    settled = [host for host in before if now - previous.listed_since_s[host.token] >= SETTLE_S]
    if any(host.token in tokens for host in settled):
        return None
    if not tokens:
        settled.sort(key=lambda host: host.member not in excluded)
    return settled[0] if settled else None


def _lines(hosts: Iterable[Host]) -> set[tuple[str, int]]:
    return {(host.token, host.slots) for host in hosts}


def parse(text: str, generation: int, now: float) -> HostList:
    """Parse a delivered list, for a sidecar that starts again; an unsound one is empty.

    The times of its changes are not known: for nudges it changed ``now``; its hosts are settled.
    """
    *lines, last = text.splitlines() or [""]
    revision = _REVISION.fullmatch(last)
    matches = [_LINE.fullmatch(line) for line in lines]
    if revision is None or not all(matches):
        return HostList()
    hosts = tuple(
        Host(f"{match[1]}.{match[2]}", match[1], int(match[3]))
        for match in matches
        if match is not None
    )
    return HostList(
        hosts,
        int(revision[1]),
        generation,
        listed_since_s={host.token: now - SETTLE_S for host in hosts},
        changed_s=now,
        renamed_s=now,
    )
