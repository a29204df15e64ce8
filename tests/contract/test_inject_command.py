# SPDX-License-Identifier: Apache-2.0
"""``muster inject`` as a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.injection.corpus import CORPUS
from tests.support.sidecars.processes import ROOT, Ended
from tests.support.waiting import DEADLINE_S

FLAGS = ("--min", "2", "--max", "4", "--etcd-endpoints", "etcd:2379", "--image", "sidecar:1")


def inject(*arguments: str, stdin: bytes = b"", environ: Mapping[str, str] | None = None) -> Ended:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    done = subprocess.run(
        [sys.executable, *("-m", "console.main", "inject", *arguments)],
        cwd=ROOT,
        env={**clean, **(environ or {})},
        input=stdin,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def written(tmp_path: Path, name: str) -> Path:
    path = tmp_path / f"{name}.yaml"
    path.write_bytes(CORPUS[name].encode())
    return path


def test_yaml_goes_to_stdout_and_what_is_left_alone_to_stderr(tmp_path: Path) -> None:
    path = written(tmp_path, "many-documents")
    ended = inject(str(path), *FLAGS)
    assert ended.status == 0
    assert "kind: Service" in ended.out
    assert "- name: muster" in ended.out
    first, *rest, last = ended.err.splitlines()
    assert first == "muster: note: Service/digits: left as it is: there is no pod template in it"
    levels = ("note", "warning")
    starts = tuple(f"muster: {level}: DaemonSet/digits: " for level in levels)
    assert all(line.startswith(starts) for line in rest)
    assert last.startswith("muster: 1 object injected, 1 left as is; ")
    assert path.read_text() == CORPUS["many-documents"]


def test_a_pipe_goes_there_and_back() -> None:
    text = b"\xef\xbb\xbf" + CORPUS["windows-lines"].encode()
    there = inject("-", *FLAGS, stdin=text)
    assert there.status == 0
    again = inject(stdin=there.out.encode())
    assert again.out == there.out
    back = inject("--remove", stdin=again.out.encode())
    assert back.out.encode() == text
    assert back.err == ""


def test_the_difference_is_all_that_is_printed(tmp_path: Path) -> None:
    path = written(tmp_path, "no-last-line-break")
    ended = inject(str(path), *FLAGS, "--job", "j", "--diff", "--no-wrap")
    assert ended.status == 0
    assert ended.out.startswith(f"--- {path}\n+++ {path}\n@@ ")
    lines = ended.out.splitlines()[3:]
    assert {line[0] for line in lines} <= {"+", " ", "-", "\\"}
    kept = [line[1:] for line in lines if line[0] in " -"]
    assert "".join(line + "\n" for line in kept if line in CORPUS["plain-pod"]).strip()
    assert "muster-hold" in ended.out
    assert inject(str(path), "--remove", "--diff").out == ""


def test_settings_come_from_variables_too(tmp_path: Path) -> None:
    path = written(tmp_path, "flow-only")
    environ = {"MUSTER_ETCD_ENDPOINTS": "e:1", "MUSTER_IMAGE": "i", "MUSTER_MIN": "1"}
    ended = inject(str(path), "--max", "2", environ=environ)
    assert ended.status == 0
    assert '"muster.dev/min": "1"' in ended.out


FLOW_ONLY = CORPUS["flow-only"].encode()
BYPASS = CORPUS["block-scalars"].replace("torchrun", "deepspeed", 1).encode()


@pytest.mark.parametrize(
    ("content", "arguments", "status", "said"),
    [
        (None, (), 2, "cannot be read (No such file or directory): check the path"),
        (b"\xff", FLAGS, 2, "is no UTF-8 text (byte 0): save it as UTF-8"),
        (b"a: [", FLAGS, 2, "column"),
        (FLOW_ONLY, ("--min", "2"), 2, "--max (MUSTER_MAX) is missing"),
        (FLOW_ONLY, (*FLAGS, "--min", "9"), 2, "raise max or lower min"),
        (FLOW_ONLY, (*FLAGS, "--object", "Job/x"), 2, "there are StatefulSet/s"),
        (FLOW_ONLY, ("--remove", "--object", "Job/x"), 2, "there are StatefulSet/s"),
        (FLOW_ONLY, (*FLAGS, "--template-path", "a"), 2, "say --template-path spec.template"),
        (BYPASS, FLAGS, 2, "starts deepspeed, whose ranks meet without Muster"),
        # No mistake, but worth a word.
        (BYPASS, (*FLAGS, "--allow-bypass"), 0, "muster: warning: Job/night: container"),
        (b"kind: Pod\nspec: text\n", (*FLAGS, "--remove"), 0, "there is no sidecar in it"),
    ],
)
def test_what_is_wrong_or_worth_a_word_is_told_without_a_traceback(
    tmp_path: Path, content: bytes | None, arguments: tuple[str, ...], status: int, said: str
) -> None:
    path = tmp_path / "train.yaml"
    if content is not None:
        path.write_bytes(content)
    ended = inject(str(path), *arguments)
    assert ended.status == status
    assert said in " ".join(ended.err.split())
    assert status == 0 or str(path) in ended.err
    assert bool(ended.out) == (status == 0)
    assert "Traceback" not in ended.err
