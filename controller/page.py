# SPDX-License-Identifier: Apache-2.0
"""A page of all jobs, served on the loopback address: who may forward the pod's ports may see it.

Its data are plain values of the jobs' states; the document is self-contained, without a build step.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web

from controller.jobs import Jobs, JobState
from launcher_shim.c10d.rounds.records import Round
from rdzv.drain.standing import phase_of
from rdzv.errors import ConfigError, RecordError
from rdzv.sentences import named

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --good: #2a8a4a; --bad: #b5432a; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem;
  padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 0; }
#link { color: var(--bad); } #link.up { color: var(--good); }
article { border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem; margin: 1rem 0; }
article.idle { opacity: .6; }
p { margin: .3rem 0; } .quiet { opacity: .7; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
th, td { text-align: left; padding: .15rem .6rem .15rem 0; border-top: 1px solid var(--soft);
  vertical-align: top; }
th { font-weight: 600; border-top: 0; }
.trains { color: var(--good); } .excluded { color: var(--bad); }
"""

SCRIPT = """
const make = (name, text, kind) => {
  const one = document.createElement(name);
  if (text !== undefined) one.textContent = text;
  if (kind) one.className = kind;
  return one;
};
const table = (heads, rows) => {
  const all = make("table"), head = make("tr");
  heads.forEach((text) => head.append(make("th", text)));
  all.append(head);
  rows.forEach((cells) => {
    const row = make("tr");
    cells.forEach(([text, kind]) => row.append(make("td", text, kind)));
    all.append(row);
  });
  return all;
};
const hour = (at) => (at ? new Date(at * 1000).toLocaleTimeString() : "");
const show = (job) => {
  const box = make("article", undefined, job.members.length ? "" : "idle");
  box.append(make("h2", `${job.namespace}/${job.job}`));
  const wanted = job.desired === null ? "" : `, ${job.desired} desired`;
  const saved = job.last_commit
    ? ` Last commit: step ${job.last_commit.step} ${hour(job.last_commit.at_unix_s)}` : "";
  box.append(make("p", `${job.sentence}${wanted}.${saved}`));
  if (job.paused) box.append(make("p", "paused", "excluded"));
  job.worlds.forEach((one) => {
    const how = one.closed ? `closed (${one.closed})` : one.complete ? "trains" : "forms";
    box.append(make("p", `World ${one.run}, round ${one.round}: ${how}: ${one.nodes.join(", ")}`));
  });
  if (job.drains.length)
    box.append(table(["drain", "phase", "why", "asked by"], job.drains.map((one) =>
      [[one.member], [`${one.phase}: ${one.sentence}`], [one.reason], [one.asked_by]])));
  if (job.members.length)
    box.append(table(["member", "machine", "state"], job.members.map((one) =>
      [[one.name], [one.node], [one.why || one.state, one.why ? "excluded" : one.state]])));
  if (job.history.length)
    box.append(table(["at", "what", "who", "why"], job.history.map((one) =>
      [[hour(one.at_unix_s)], [one.what], [one.who], [one.why]])));
  return box;
};
const link = document.getElementById("link"), jobs = document.getElementById("jobs");
const stream = new EventSource("jobs/stream");
stream.onmessage = (told) => {
  const all = JSON.parse(told.data);
  jobs.replaceChildren(...all.map(show));
  if (!all.length) jobs.append(make("p", "The store has no job.", "quiet"));
  link.textContent = `as of ${new Date().toLocaleTimeString()}`;
  link.className = "up";
};
stream.onerror = () => { link.textContent = "no connection"; link.className = ""; };
"""

DOCUMENT = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Muster</title><style>{STYLE}</style></head>
<body><h1>Muster <small id="link">connecting</small></h1><main id="jobs"></main>
<script>{SCRIPT}</script></body>
</html>
"""

NEWEST = 8
"""Number of history entries to show."""

ADDRESS = "127.0.0.1"
OWN_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Accepted hosts, which a browser sends if the port is forwarded. Any other host would be that of
a website whose DNS name resolves to this address (DNS rebinding)."""
STREAMS_MAX = 32
REST_S = 1.0
"""Minimum interval between two updates of one stream."""
ALIVE_S = 15.0
"""Time without a change after which a comment is sent, so that abandoned connections end."""


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)};"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy: names and reasons on the page come from pods, hence untrusted."""


def summary(states: Iterable[JobState]) -> list[dict[str, Any]]:
    """Build the data of all jobs, those with members first."""
    found = [_job(one) for one in states]
    return sorted(found, key=lambda job: (not job["members"], job["namespace"], job["job"]))


def _job(state: JobState) -> dict[str, Any]:
    snapshot, job = state.snapshot, state.snapshot.job
    assert job is not None
    newest = list(rounds(state, job.generation))
    worlds = [_world(run, found) for run, found in newest]
    ends = {s.member for _, one in newest if one.finishing and not one.closed for s in one.frozen}
    trains = {name for world in worlds if world["complete"] for name in world["nodes"]}
    last = snapshot.commit_to_start_from
    history = reversed(state.entries_after(0)[-NEWEST:])
    return {
        "namespace": state.keys.namespace,
        "job": state.keys.job_name,
        "generation": job.generation,
        "min": job.policy.min_nodes,
        "max": job.policy.max_nodes,
        "desired": job.desired,
        "paused": job.paused,
        "sentence": state.listing.reason,
        "last_commit": None if last is None else {"step": last.step, "at_unix_s": last.at_unix_s},
        "members": list(_members(state, trains)),
        "worlds": worlds,
        "drains": list(_drains(state, ends)),
        "history": [
            {"at_unix_s": one.at_unix_s, "what": one.what, "who": one.member, "why": one.why}
            for one in history
        ],
    }


def _members(state: JobState, trains: set[str]) -> Iterator[dict[str, str]]:
    listing = state.listing
    standby = {one.name for one in listing.standby}
    for member in sorted(state.snapshot.members.values(), key=lambda one: one.age_order):
        why = listing.excluded.get(member.name, "")
        stands = "standby" if member.name in standby else "listed"
        if member.name in trains:
            stands = "trains"
        elif why:
            stands = "excluded"
        yield {"name": member.name, "node": member.node, "state": stands, "why": why}


def rounds(state: JobState, generation: int) -> Iterator[tuple[str, Round]]:
    """Yield the newest round of each run that can be read."""
    here = state.keys.in_generation(generation)
    for kv in state.rounds:
        run = here.run_of_round(kv.key)
        if run is None:
            continue
        try:
            yield run, Round.from_kv(kv)
        except RecordError:
            continue  # the sidecars report it


def _world(run: str, found: Round) -> dict[str, Any]:
    return {
        "run": run,
        "round": found.number,
        "complete": found.complete and not found.closed,
        "closed": found.closed,
        "nodes": [seat.member for seat in found.frozen],
    }


def _drains(state: JobState, ends: set[str]) -> Iterator[dict[str, str]]:
    """Yield the drains of the pods that are there; ``ends``: members whose world is finishing."""
    here = {one.pod_uid for one in state.snapshot.members.values()}
    for drain in state.snapshot.drains.values():
        if drain.pod_uid in here:
            phase = phase_of(state.snapshot, drain, finishing=drain.member in ends)
            asked = drain.requested_by if drain.requested_by != drain.member else drain.source
            yield {
                "member": drain.member,
                "reason": drain.reason,
                "asked_by": asked,
                "phase": phase.name,
                "sentence": phase.sentence,
            }


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


def page(jobs: Jobs) -> web.Application:
    """Build the application that serves ``/``, ``/jobs`` and ``/jobs/stream``."""
    streams: set[web.StreamResponse] = set()

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.host.rpartition(":")[0] if request.host[-1:].isdigit() else request.host
        if host not in OWN_NAMES and request.host not in OWN_NAMES:
            return web.Response(status=403, text="forward the port, and ask for localhost\n")
        return await handler(request)

    def picture() -> str:
        return json.dumps(summary(jobs.states().values()), separators=(",", ":"))

    async def document(request: web.Request) -> web.Response:
        return web.Response(text=DOCUMENT, content_type="text/html", headers=HEADERS)

    async def all_jobs(request: web.Request) -> web.Response:
        return web.Response(text=picture(), content_type="application/json", headers=HEADERS)

    async def stream(request: web.Request) -> web.StreamResponse:
        if len(streams) >= STREAMS_MAX:
            return web.Response(status=503, text="too many look at it already\n")
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        streams.add(answer)
        try:
            await answer.prepare(request)
            shown = ""
            while True:
                sequence, now = jobs.sequence, picture()
                await answer.write(f"data: {now}\n\n".encode() if now != shown else b":\n\n")
                shown = now
                await asyncio.sleep(REST_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(ALIVE_S):
                        await jobs.changed_after(sequence)
        except ConnectionResetError:
            return answer
        finally:
            streams.discard(answer)

    pages = web.Application(middlewares=[guarded])
    pages.router.add_get("/", document)
    pages.router.add_get("/jobs", all_jobs)
    pages.router.add_get("/jobs/stream", stream)
    return pages


@asynccontextmanager
async def serving_page(jobs: Jobs, port: int) -> AsyncIterator[int]:
    """Serve until the block ends; yields the port. Raises ``ConfigError`` if it cannot be bound."""
    runner = web.AppRunner(page(jobs), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, ADDRESS, port).start()
        except OSError as error:
            raise ConfigError(
                f"{named('--page-port')}: {port} of {ADDRESS} cannot be had ({error.strerror}):"
                " give another, or 0 for no page"
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
