# SPDX-License-Identifier: Apache-2.0
"""What docs/kubernetes.md shows is what is applied, and what inject makes of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from textwrap import dedent, indent

import pytest

from agent.rundir.programs import PROGRAMS, program
from injection.injection import Request, inject
from injection.settings import TABLE
from injection.sidecar import RUN_DIR_SIZE
from tests.support.injection.injecting import FLAGS, injected
from tests.support.waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_page_leads_to_each_example(path: Path) -> None:
    assert f"(../examples/kubernetes/{path.name})" in PAGE


def test_the_page_leads_to_the_mpijob_which_is_taken_as_it_is() -> None:
    path = ROOT / "examples" / "kubernetes" / "horovod" / "mpijob.yaml"
    text = path.read_text(encoding="utf-8")
    page = (ROOT / "docs" / "horovod.md").read_text(encoding="utf-8")
    assert f"(../examples/kubernetes/horovod/{path.name})" in page
    assert injected(text, job=None, min_nodes=None, max_nodes=None).text != text


def test_the_pair_on_the_page_is_taken_as_it_says() -> None:
    path = ROOT / "examples" / "kubernetes" / "horovod" / "pair.yaml"
    text = path.read_text(encoding="utf-8")
    sizes = {"min_nodes": "1", "max_nodes": "3"}
    for name, role in (
        ("Job/digits-launcher", "launcher"),
        ("StatefulSet/digits-worker", "worker"),
    ):
        flags = {**FLAGS, **sizes, "horovod": role}
        text = inject(text, Request(flags, {}, objects=(name,))).text
    assert text.count('value: "9401"') == 2


def test_the_sidecar_on_the_page_is_the_one_that_is_made() -> None:
    text = (ROOT / "examples" / "kubernetes" / "deployment.yaml").read_text(encoding="utf-8")
    made = injected(text, job=None).text
    part = made[made.index("      initContainers:") : made.index("      containers:")]
    assert indent(dedent(part), "    ") in PAGE


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_an_image_must_have_is_on_the_page(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(program(name))
    path.chmod(0o755)
    done = subprocess.run(
        [path, "--", "true"],
        env={"PATH": "/none"},
        timeout=DEADLINE_S,
        check=False,
        capture_output=True,
    )
    assert b"no python3 in the PATH" in done.stderr
    (row,) = [line for line in PAGE.splitlines() if "no `python3`" in line]
    assert f"with {done.returncode} where there is no Python" in row
    assert f"`{name}`" in row
    assert "`/bin/sh`" in row


def test_every_option_on_the_page_is_there() -> None:
    known = {setting.flag for setting in TABLE.values()}
    known |= {"--no-wrap", "--object", "--template-path", "--diff", "--remove"}
    lines = [
        line
        for line in PAGE.splitlines()
        if "inject " in line and not re.search("kubectl drain|accelerate launch", line)
    ]
    named = set(re.findall(r"(?<!\S)--[a-z-]+", " ".join(lines)))
    assert named
    assert named <= known
    assert RUN_DIR_SIZE.replace("Mi", " MiB") in PAGE
