# SPDX-License-Identifier: Apache-2.0
"""The errors of this pod's ranks, as the hook in each of them writes them.

They come from the training container and go to the store, where the whole job's users read them: so
what may be a secret is masked here.
"""

from __future__ import annotations

import re
from pathlib import Path

from launcher_shim.rundir.layout import read_untrusted
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.records.codec import load_record, take, take_seconds

REPORT_MAX_BYTES = 4096
READ_MAX = 256
"""The most files that are looked at: there is one for each local rank."""

MASK = "***"

_CREDENTIALS = re.compile(r"://[^\s/@]{1,200}@")
_QUERY = re.compile(r"(://[^\s?'\"]{1,200})\?[^\s'\")]{1,1000}")
_NAMED = re.compile(
    r"(?i)\b([a-z0-9_-]{0,40}(?:password|passwd|token|secret|api_?key|credential)s?['\"]?"
    r"\s{0,3}[=:]\s{0,3})[^\s,;&)]{1,400}"
)
_WORD = re.compile(r"[A-Za-z0-9_+-]{20,}")
_PREFIXES = ("hf_", "ghp_", "gho_", "github_pat_", "glpat-", "sk-", "xox", "AKIA", "ASIA", "eyJ")


@dataclass(frozen=True, slots=True)
class FailureReport:
    """One uncaught exception of a rank; ``at_boot_s`` is of the clock that all processes share.

    ``master`` names its round, as in ``LiveRound``. ``text`` is masked.
    """

    pid: int
    rank: int
    local_rank: int
    master: str
    kind: str
    text: str
    where: str
    at_boot_s: float

    @property
    def follows(self) -> bool:
        """Whether the end of another rank is its cause."""
        return _OF_ANOTHER.search(self.text) is not None


_OF_ANOTHER = re.compile(r"(closed|reset) by peer|[Bb]roken pipe|remote process exited")


def read_failures(directory: Path) -> tuple[FailureReport, ...]:
    """Read what the ranks have reported, the earliest first; skip a file that is no report."""
    try:
        paths = sorted(directory.glob("*.json"))[:READ_MAX]
    except OSError:
        return ()
    found = [report for path in paths if (report := _read(path)) is not None]
    return tuple(sorted(found, key=lambda report: report.at_boot_s))


def _read(path: Path) -> FailureReport | None:
    try:
        fields = load_record(path.name, read_untrusted(path, REPORT_MAX_BYTES))
        return FailureReport(
            pid=take(path.name, fields, "pid", int),
            rank=take(path.name, fields, "rank", int),
            local_rank=take(path.name, fields, "local_rank", int),
            master=take(path.name, fields, "master", str),
            kind=take(path.name, fields, "kind", str),
            text=masked(take(path.name, fields, "text", str)),
            where=take(path.name, fields, "where", str),
            at_boot_s=take_seconds(path.name, fields, "at_boot_s"),
        )
    except (OSError, RecordError):
        return None


def masked(text: str) -> str:
    """Return ``text`` without what looks like a credential.

    That is: the user in a URL and its query, the value after a name such as ``token=``, and a word
    that looks like a key.
    """
    text = _CREDENTIALS.sub(f"://{MASK}@", text)
    text = _QUERY.sub(rf"\1?{MASK}", text)
    text = _NAMED.sub(rf"\1{MASK}", text)
    return _WORD.sub(lambda word: MASK if _looks_secret(word[0]) else word[0], text)


def _looks_secret(word: str) -> bool:
    if word.startswith(_PREFIXES):
        return True
    digits = sum(c.isdigit() for c in word)
    if len(word) >= 32 and set(word.lower()) <= set("0123456789abcdef"):
        return True
    return digits >= 3 and any(c.islower() for c in word) and any(c.isupper() for c in word)
