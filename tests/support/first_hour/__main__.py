# SPDX-License-Identifier: Apache-2.0
"""Prints the transcript of a newcomer's first hour, or keeps it: see ``scripts/first-hour``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.support.first_hour.hour import HEAD, TRANSCRIPT, run_hour

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="hour-") as folder:
        text = "\n".join([HEAD, *run_hour(Path(folder))])
    if "--write" in sys.argv:
        TRANSCRIPT.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
