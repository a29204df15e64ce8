# SPDX-License-Identifier: Apache-2.0
"""The stacks of ranks, as ``launcher_shim.pod.stacks`` writes them.

The file comes from the training container: whatever it contains may leave a rank without a stack,
but does no more harm.
"""

from __future__ import annotations

from pathlib import Path

from launcher_shim.rundir import layout
from launcher_shim.rundir.safe_open import read_untrusted
from launcher_shim.rundir.stack_frames import FRAMES_MAX, StackFrame
from rdzv.errors import RecordError
from rdzv.records.codec import load_record

STACKS_MAX_BYTES = 4 * 1024 * 1024


def read_stacks(run_dir: Path, ask: str) -> dict[int, tuple[str, list[StackFrame]]] | None:
    """Read the answer to ``ask``: state and stack by process; None if there is none yet."""
    try:
        content = read_untrusted(run_dir / layout.LAUNCH / layout.STACKS, STACKS_MAX_BYTES)
        fields = load_record(layout.STACKS, content)
        if fields["ask"] != ask:
            return None
        return {
            int(one["pid"]): (str(one["state"]), [_frame(*f) for f in one["frames"][:FRAMES_MAX]])
            for one in fields["ranks"]
        }
    except (OSError, RecordError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _frame(path: str, line: int, function: str) -> StackFrame:
    return StackFrame(str(path), int(line), str(function))
