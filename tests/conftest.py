# SPDX-License-Identifier: Apache-2.0
"""What every test shares: no test blocks the event loop, none sees the caller's settings.

Tests run in a few processes at once, for most of them wait more than they work. Those that start
real jobs, share a cluster, or bring faults to real etcd members go one after another in four
sequences: more at once would be too slow. These begin first, as they are the longest. What only
computes comes last, wherever there is room, and gives way to all others.

Properties are tried on the same examples every day, however slowly this machine gets through them;
``MUSTER_TEST_RANDOM`` has new ones drawn.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from xdist.scheduler import LoadScopeScheduling

from muster import process, resuming

settings.register_profile(
    "suite",
    deadline=None,
    derandomize=not os.environ.get("MUSTER_TEST_RANDOM"),
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")
if not os.environ.get("MUSTER_TEST_RANDOM"):
    # Some of what is drawn would be constants of the modules that this process has imported so far:
    # which they are depends on the tests it was given. There is no setting for it, and a version of
    # hypothesis that names this otherwise is an error here.
    pytest.MonkeyPatch().setattr(providers, "_get_local_constants", Constants)

# Each Python that a test starts finds its sitecustomize.py there.
_startup = str(Path(__file__).parent / "support" / "startup")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [_startup, *filter(None, [os.environ.get("PYTHONPATH")])]
)

# No test sees a muster local that runs outside of it, the caller's cluster, or the caller's file.
_state = tempfile.TemporaryDirectory(prefix="muster-state-")
os.environ["XDG_STATE_HOME"] = os.environ["XDG_CONFIG_HOME"] = _state.name
os.environ["KUBECONFIG"] = str(Path(_state.name) / "no-kubeconfig")

# Under nohup, or in the background of a shell, some are ignored, which every program that a test
# starts would inherit.
for _number, _usual in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

TOGETHER = (
    re.compile(r"tests/e2e/test_(kube|operator|inject_server|image)"),
    re.compile(r"tests/e2e/test_([a-i]|li)"),
    re.compile(r"tests/e2e/(?!test_local_nodes)"),
    re.compile(r"tests/chaos/test_(fault_matrix|scale|doctor)"),
)
"""Sequences; all tests that use the cluster of Kubernetes are in the first, real jobs in the next
two, which take about as long, and those whose etcd members would suffer from each other's in the
fourth."""

COMPUTES = re.compile(r"tests/(chaos/test_drain_|simulation/|unit/|world/)")
"""Tests that wait for nothing, and whose time is virtual where they have any."""


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """Which tests one process runs, one after another; any other test goes wherever there is room.

    A file of unit tests, or of the chart, is one piece: what it reads once, a process reads once.

    The marks of pytest-xdist do not do it: with pytest 9 they have no effect.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path.startswith(("tests/unit/", "tests/chart/")):
            return path
        return next((files.pattern for files in TOGETHER if files.match(path)), nodeid)


def pytest_configure(config: pytest.Config) -> None:
    """Begin with what comes first: pytest-xdist would with the file that has the most tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the sequences first, and last what only computes."""

    def turn(item: pytest.Item) -> int:
        if any(files.match(item.nodeid) for files in TOGETHER):
            return 0
        return 2 if COMPUTES.match(item.nodeid) else 1

    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let no garbage collection look through torch and all tests: it took a fifth of the time.

    Nothing that is made here is thrown away.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


_gives_way = False


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a process of many give way to the others from its first test on that only computes."""
    global _gives_way
    if not _gives_way and os.environ.get("PYTEST_XDIST_WORKER") and COMPUTES.match(item.nodeid):
        _gives_way = True
        os.nice(5)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Together:
    return Together(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell of a failure as it comes: a run that is ended before its summary would tell of none."""
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        sys.stdout.write(
            f"\n{report.when} of {report.nodeid} failed:\n{report.longreprtext[-4000:]}\n"
        )
        sys.stdout.flush()


@pytest.fixture(autouse=True)
def _no_blocking_call() -> Iterator[None]:
    with blockbuster_ctx() as blockbuster:
        for function in blockbuster.functions.values():
            # A test that hangs in its event loop is ended there, after the stacks were written.
            function.can_block_in("pytest_timeout.py", "timeout_sigalrm")
            # An event loop of its own, in which nothing else waits.
            function.can_block_in("controller/cluster/access.py", "_load")
        yield


@pytest.fixture(autouse=True)
def _a_process_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """No check was passed over yet, and no checkpoint loaded."""
    monkeypatch.setattr(process, "passed_over", [])
    monkeypatch.setattr(resuming, "_started_from", None)


@pytest.fixture(autouse=True)
def _log_levels_put_back() -> Iterator[None]:
    """Put back what a command, run within this process, sets for the whole of its own."""
    levels = {
        name: one.level
        for name, one in logging.root.manager.loggerDict.items()
        if isinstance(one, logging.Logger)
    }
    root = logging.root.level
    yield
    logging.root.setLevel(root)
    for name, one in logging.root.manager.loggerDict.items():
        if isinstance(one, logging.Logger) and one.level != levels.get(name, logging.NOTSET):
            one.setLevel(levels.get(name, logging.NOTSET))


@pytest.fixture(autouse=True)
def _one_worker_store_a_round(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's handlers of one process would share a worker store from round to round."""
    if request.path.parent.name in ("chaos", "contract"):
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture(autouse=True, scope="session")
def _clean_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in tuple(os.environ):
            if name.startswith(("MUSTER_", "PET_")) and not name.startswith("MUSTER_TEST_"):
                monkeypatch.delenv(name)
        yield
