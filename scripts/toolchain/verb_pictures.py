# SPDX-License-Identifier: Apache-2.0
"""Pictures of commands about a job that runs: what they printed on a terminal, as it was."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parents[2] / "docs"
JOB = "digits"
COLUMNS = 100
TIMEOUT_S = 240.0
CHARACTER = 12.2
"""Width of a character in the pictures of rich."""
LINES = 22
"""Lines of the picture of logs."""

RANKS = 3
DRILL = (f"--nodes={RANKS}", "--event=drain:rank0@world3+5s", "--event=add@world2+5s")
SCRIPT = ("examples/torch_digits.py", "--epochs=1000")
"""It trains for longer than it is looked at."""

LAST_WORLD = re.compile(r"── world 2 → 3 .*")
TRACEBACK = re.compile(r"^\S* ?(\S*\[[\d-]+\]\S*) (Traceback|\s|torch\.distributed\.elastic\S+Sig)")
"""Lines by which a torchrun ends that was drained: they would fill the picture, and are omitted."""

FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Fonts from the network: a page that shows the picture may load none."""


INDENTED = re.compile(r' x="([\d.]+)"( y="[\d.]+") textLength="([\d.]+)"([^>]*)>((?:&#160;)+)(?!<)')
"""Text that begins with spaces: some viewers leave these out, so it is moved instead."""


class Typed:
    """``muster`` on a terminal of its own, without a keyboard."""

    def __init__(self, *words: str) -> None:
        self._far, near = pty.openpty()
        os.set_blocking(self._far, False)
        environ = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
        self.run = subprocess.Popen(
            [sys.executable, "-m", "console.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=near,
            stderr=subprocess.DEVNULL,
            env=environ,
        )
        os.close(near)
        self._read = b""

    @property
    def text(self) -> str:
        """All that it has printed so far."""
        with suppress(OSError):  # nothing more now, or the command has ended
            while piece := os.read(self._far, 65536):
                self._read += piece
        return self._read.decode("utf-8", "replace").replace("\r\n", "\n")

    def whole(self) -> str:
        """Wait for its end, and return all that it has printed."""
        until(lambda: bool(self.text) and self.run.poll() is not None, "the command to end")
        return self.text

    def until(self, pattern: re.Pattern[str], lines: int) -> str:
        """Wait for a line, and ``lines`` more after it; end the command, and return all."""

        def there() -> bool:
            found = pattern.search(self.text)
            return found is not None and self.text[found.end() :].count("\n") > lines

        try:
            until(there, pattern.pattern)
            return self.text
        finally:
            self.run.kill()


def until(holds: Callable[[], object], what: str) -> None:
    """Wait until ``holds()``; end with a sentence if it takes too long."""
    ends_s = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > ends_s:
            raise SystemExit(f"waited {TIMEOUT_S:g} s for {what}")
        time.sleep(0.2)


def printed(*words: str) -> str:
    """Return what a command prints in a pipe."""
    command = [sys.executable, "-m", "console.main", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def draw(name: str, command: str, text: str) -> None:
    """Write one picture: the command, and below it what it printed."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(Text(f"$ {command}", style="bold"))
    for line in text.rstrip("\n").splitlines():
        console.print(Text.from_ansi(line), no_wrap=True, overflow="ellipsis", crop=True)
    drawn = FONTS.sub("", console.export_svg(title=command, unique_id=name))
    drawn = INDENTED.sub(_moved, drawn)
    (DOCS / f"{name}.svg").write_text(drawn)


def _moved(found: re.Match[str]) -> str:
    """Return the text of ``INDENTED`` without its first spaces, as far to the right as before."""
    x, y, length, more, spaces = found.groups()
    left = CHARACTER * spaces.count("&")
    return f' x="{float(x) + left:.1f}"{y} textLength="{float(length) - left:.1f}"{more}>'


def main() -> None:
    """Run a job, and draw what the commands show of it."""
    with tempfile.TemporaryDirectory() as state:
        os.environ.update(XDG_STATE_HOME=state, CHECKPOINT_DIR=f"{state}/checkpoints")
        words = [sys.executable, "-m", "console.main", "local", "--job", JOB, *DRILL]
        training = [sys.executable, "-m", "torch.distributed.run", *SCRIPT]
        job = subprocess.Popen([*words, "--", *training], stdout=subprocess.DEVNULL)
        try:
            until(lambda: "training" in printed("list"), "the job's first world")
            logs = Typed("logs", JOB, "-f").until(LAST_WORLD, RANKS)
            lines = [line for line in logs.splitlines() if not TRACEBACK.match(line)]
            draw("logs", f"muster logs {JOB} -f", "\n".join(lines[-LINES:]))
            top = ""
            ends_s = time.monotonic() + TIMEOUT_S
            while not ("steps/s" in top and top.count("%") == RANKS):
                if time.monotonic() > ends_s:
                    raise SystemExit("the rate and the shares of waiting are not known")
                top = Typed("top", JOB).whole()
            draw("top", f"muster top {JOB}", top)
            draw("get", f"muster get {JOB}", Typed("get", JOB).whole())
        finally:
            job.terminate()
            job.wait()


if __name__ == "__main__":
    main()
