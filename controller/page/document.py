# SPDX-License-Identifier: Apache-2.0
"""The HTML document of the page: self-contained, without a build step."""

from __future__ import annotations

import base64
import hashlib

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


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)};"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy: names and reasons on the page come from pods, hence untrusted."""
