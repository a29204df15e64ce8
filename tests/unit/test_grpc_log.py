# SPDX-License-Identifier: Apache-2.0
"""gRPC's own log is off in the program, and as the user has it in a training started from there."""

from __future__ import annotations

import pytest

from console import grpc_log

VARIABLE = "GRPC_VERBOSITY"


@pytest.mark.parametrize("given", [None, "DEBUG", "ERROR"])
def test_a_training_gets_the_environment_of_its_user(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ: dict[str, str] = {"PATH": "/bin", **({VARIABLE: given} if given else {})}
    monkeypatch.setattr("os.environ", environ)
    before = {**environ}
    grpc_log.switch_off()
    assert environ[VARIABLE] == (given or "NONE")
    assert grpc_log.without(environ) == before
