# SPDX-License-Identifier: Apache-2.0
"""What rank 0 has told the ranks, over a store that outlives them; it is torch's."""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed", reason="the store is torch's")

from torch.distributed import TCPStore

from muster import choice


def asked(
    monkeypatch: pytest.MonkeyPatch, rank: int, restart: int, found: str | None = None
) -> str | None:
    """What a process is told that has started just now; ``found`` is what it finds itself."""
    monkeypatch.setattr(choice, "_calls", 0)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
    return choice.of_rank_0(lambda: found)


@pytest.fixture(autouse=True)
def _agents(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """As below a plain torchrun, whose agent serves the store to all attempts."""
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return agents


def test_an_error_of_rank_0_is_raised_at_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> str:
        raise PermissionError("checkpoints: no right to read")

    monkeypatch.setattr(choice, "WAIT_S", 30.0)
    monkeypatch.setattr(choice, "_calls", 0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(PermissionError):
        choice.of_rank_0(look)
    with pytest.raises(RuntimeError, match="PermissionError: checkpoints: no right to read"):
        asked(monkeypatch, 1, 0)


def test_restarted_ranks_are_not_told_what_was_found_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asked(monkeypatch, 0, 0, "step-10") == "step-10"
    assert asked(monkeypatch, 1, 0) == "step-10"
    with monkeypatch.context() as hurried:
        hurried.setattr(choice, "WAIT_S", 1.0)  # nobody tells it: this only ends
        with pytest.raises(RuntimeError, match="rank 0 has not said"):
            asked(hurried, 1, 1)
    assert asked(monkeypatch, 0, 1, "step-20") == "step-20"
    assert asked(monkeypatch, 1, 1) == "step-20"
