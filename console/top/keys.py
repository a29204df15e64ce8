# SPDX-License-Identifier: Apache-2.0
"""The keys of ``muster top``: what is typed, and what it asks for."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

HELP = "↑↓ choose a pod · d drain it · p pause or resume · l logs · q quit"

_ARROWS = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}
_MEANINGS = {"k": "up", "j": "down", "d": "drain", "p": "pause", "l": "logs", "q": "quit"}


@dataclass(frozen=True, slots=True)
class Verb:
    """A command to run, after ``question`` is answered with yes; empty: at once."""

    name: str
    words: tuple[str, ...]
    question: str = ""


def meaning_of(typed: str) -> str:
    """Return what a key stands for; empty for a key without a meaning."""
    return _ARROWS.get(typed) or _MEANINGS.get(typed.lower(), "")


def moved(pods: Sequence[str], chosen: str | None, step: int) -> str | None:
    """Return the pod that is chosen after a move, from the first one on; None without pods."""
    if not pods:
        return None
    if chosen not in pods:
        return pods[0]
    return pods[max(0, min(len(pods) - 1, pods.index(chosen) + step))]


def verb_of(meaning: str, job: str, chosen: str | None, *, paused: bool) -> Verb | None:
    """Return the command that a key asks for; None for none.

    ``job`` and ``chosen`` are names as the user and the API server give them: a sidecar, which a
    tenant may replace, does not say what a command acts on.
    """
    if meaning == "drain" and chosen is not None:
        return Verb("drain", ("--job", job, "--", chosen), f"drain {chosen}?")
    if meaning == "pause" and paused:
        return Verb("resume", ("--job", job), f"resume {job}?")
    if meaning == "pause":
        return Verb("pause", ("--job", job), f"save and pause {job}?")
    if meaning == "logs":
        return Verb("logs", ("--follow", "--tail", "20", "--", job))
    return None


class Keyboard:
    """The terminal's keyboard: keys come one by one, and are not shown."""

    def __init__(self) -> None:
        self._typed: asyncio.Queue[str] = asyncio.Queue()
        self._descriptor = sys.stdin.fileno()

    async def key(self) -> str:
        """Wait for a key."""
        return await self._typed.get()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Read keys within the context; the terminal is as before after it."""
        before = termios.tcgetattr(self._descriptor)
        loop = asyncio.get_running_loop()
        tty.setcbreak(self._descriptor)
        loop.add_reader(self._descriptor, self._read)
        try:
            yield
        finally:
            loop.remove_reader(self._descriptor)
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, before)

    def _read(self) -> None:
        text = os.read(self._descriptor, 64).decode("utf-8", "replace")
        for typed in [text] if text in _ARROWS else text:
            self._typed.put_nowait(typed)
