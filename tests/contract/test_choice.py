# SPDX-License-Identifier: Apache-2.0
"""What rank 0 has told the ranks of its world, over torch's store, which may be older than it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

pytest.importorskip("torch.distributed", reason="the store is torch's")

from torch.distributed import TCPStore

from muster import checkpoints
from muster.process import RankIdentity
from tests.support.ports import free_ports

pytestmark = pytest.mark.timeout(120)


class Worlds:
    """The worlds of a job, one after the other, at one store; an agent's, or each rank 0's own."""

    def __init__(self, *, served: bool) -> None:
        self.served = served
        self._agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self._agents.port
        if not served:
            (self.port,) = free_ports(1)

    def rank(self, rank: int, restarts: int, size: int = 3) -> RankIdentity:
        """A rank in the environment of a torchrun that counts so many restarts."""
        return RankIdentity(
            {
                "TORCHELASTIC_RUN_ID": "job",
                "TORCHELASTIC_RESTART_COUNT": f"{restarts}",
                "RANK": f"{rank}",
                "WORLD_SIZE": f"{size}",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": f"{self.port}",
            }
        )

    def begin(self, pool: ThreadPoolExecutor, rank: int, restarts: int, found: str = "") -> Told:
        """A process that has started just now asks; ``found`` is what it finds itself."""

        def look() -> str:
            if found == "error":
                raise PermissionError("checkpoints: no right to read")
            return found

        own = self.rank(rank, restarts)
        return pool.submit(checkpoints.choose, look, own, 1, served=self.served)

    def told(self, restarts: Sequence[int], found: str) -> list[str | None]:
        """What all ranks of a world are told, with the counts of restarts of their torchruns."""
        with ThreadPoolExecutor(3) as pool:
            late = [self.begin(pool, rank, restarts[rank], "other") for rank in (1, 2)]
            return [each.result() for each in (self.begin(pool, 0, restarts[0], found), *late)]


Told = Future[str | None]

WORLD_BY_WORLD = [((0, 1, 0), "step-10"), ((0, 1, 0), "step-20"), ((2, 1, 0), "step-20")]


def test_ranks_of_unequal_restart_counts_are_told_the_same() -> None:
    """A node whose worker failed has one more than the others; a new pod has none."""
    assert Worlds(served=False).told((0, 1, 0), "step-10") == ["step-10"] * 3


def test_no_rank_is_told_what_an_earlier_world_found_at_the_agents_store() -> None:
    worlds = Worlds(served=True)
    for restarts, found in WORLD_BY_WORLD:
        assert worlds.told(restarts, found) == [found] * 3


def test_a_world_that_ended_early_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worlds = Worlds(served=True)
    monkeypatch.setattr(checkpoints, "WAIT_S", 2.0)  # it is killed meanwhile
    with ThreadPoolExecutor(3) as pool:
        ranks = [worlds.begin(pool, 0, 0, "step-10"), worlds.begin(pool, 1, 0)]
        with pytest.raises(RuntimeError, match=r"ranks \[2\] have not asked within 2 s"):
            ranks[0].result()
        assert ranks[1].result() == "step-10"
    monkeypatch.undo()
    assert worlds.told((1, 0, 0), "step-20") == ["step-20"] * 3


@pytest.mark.parametrize("served", [False, True])
def test_an_error_of_rank_0_is_raised_at_every_rank(served: bool) -> None:
    worlds = Worlds(served=served)
    with ThreadPoolExecutor(3) as pool:
        ranks = [worlds.begin(pool, rank, 0, "error") for rank in (2, 1, 0)]
        with pytest.raises(PermissionError):
            ranks[2].result()
        for rank in ranks[:2]:
            with pytest.raises(RuntimeError, match="PermissionError: checkpoints: no right"):
                rank.result()


def test_a_rank_that_waits_says_what_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worlds = Worlds(served=True)
    monkeypatch.setattr(checkpoints, "WAIT_S", 2.0)
    monkeypatch.setattr(checkpoints, "SAY_S", 0.1)
    with ThreadPoolExecutor(3) as pool, caplog.at_level(logging.WARNING):
        told = worlds.begin(pool, 1, 0)
        with pytest.raises(RuntimeError, match="rank 0 did not choose a checkpoint"):
            told.result()
    assert "rank 0 has not said yet which checkpoint it loads" in caplog.text
