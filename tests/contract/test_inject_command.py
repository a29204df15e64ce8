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


def test_what_goes_past_muster_is_refused_unless_it_is_meant() -> None:
    text = CORPUS["block-scalars"].replace("torchrun", "deepspeed", 1).encode()
    refused = inject("-", *FLAGS, stdin=text)
    assert (refused.status, refused.out) == (2, "")
    assert "starts deepspeed, whose ranks meet without Muster" in " ".join(refused.err.split())
    meant = inject("-", *FLAGS, "--allow-bypass", stdin=text)
    assert meant.status == 0
    assert "muster: warning: Job/night: container" in meant.err


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


def test_taking_out_what_is_not_there_says_so(tmp_path: Path) -> None:
    ended = inject(str(written(tmp_path, "plain-pod")), "--remove")
    assert (ended.status, ended.out) == (0, CORPUS["plain-pod"])
    assert "there is no sidecar in it" in ended.err


def test_taking_out_of_one_object_leaves_the_other(tmp_path: Path) -> None:
    one = CORPUS["block-scalars"]
    text = one + "---\n" + one.replace("name: night", "name: day")
    path = tmp_path / "train.yaml"
    path.write_text(inject("-", *FLAGS, "--object", "Job/*", stdin=text.encode()).out)
    ended = inject(str(path), "--remove", "--object", "Job/day")
    assert ended.status == 0
    assert ended.err == "muster: note: Job/night: left as it is: no --object names it\n"
    kept, taken = ended.out.split("---\n")
    assert kept == path.read_text().split("---\n")[0]
    assert taken == text.split("---\n")[1]


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (None, (), "cannot be read (No such file or directory): check the path"),
        (b"\xff", FLAGS, "is no UTF-8 text (byte 0): save it as UTF-8"),
        (b"a: [", FLAGS, "column"),
        (CORPUS["flow-only"].encode(), ("--min", "2"), "--max (MUSTER_MAX) is missing"),
        (CORPUS["flow-only"].encode(), (*FLAGS, "--min", "9"), "raise max or lower min"),
        (CORPUS["flow-only"].encode(), (*FLAGS, "--object", "Job/x"), "there are StatefulSet/s"),
        (
            CORPUS["flow-only"].encode(),
            (*FLAGS, "--template-path", "a"),
            "say --template-path spec.template",
        ),
        (b"kind: Pod\nspec: text\n", (*FLAGS, "--remove"), "there is no sidecar in it"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(
    tmp_path: Path, content: bytes | None, arguments: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "train.yaml"
    if content is not None:
        path.write_bytes(content)
    ended = inject(str(path), *arguments)
    assert ended.status == (0 if "--remove" in arguments else 2)
    assert said in ended.err
    assert str(path) in ended.err
    assert "Traceback" not in ended.err


def test_help_has_every_setting_and_an_example() -> None:
    ended = inject("--help")
    assert ended.status == 0
    for option in ("--job", "--etcd-secret", "--wrap / --no-wrap", "--template-path", "--remove"):
        assert option in ended.out
    assert "muster inject train.yaml" in ended.out.split("Example", 1)[1]
