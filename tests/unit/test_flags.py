# SPDX-License-Identifier: Apache-2.0
"""A sentence for a user names a setting by its flag and its variable, which follow each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from agent.config.job import JobConfig, StoreConfig
from agent.config.sidecar import Config
from agent.config.table import settings_of
from controller.config import ControllerConfig
from rdzv.sentences import named, variable_of

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for package in ("agent", "console", "controller", "injection", "launcher_shim", "rdzv")
    for path in (ROOT / package).rglob("*.py")
]
OF_OTHER_COMMANDS = {"--wrap", "--no-wrap", "--container", "--pod-failure-policy"}
"""Flags of ``muster inject`` that are no setting of the sidecar."""
FLAGS = {
    setting.flag
    for kind in (Config, ControllerConfig, JobConfig, StoreConfig)
    for setting in settings_of(kind).values()
}


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--run-dir", "--run-dir (MUSTER_RUN_DIR)"),
        ("--etcd-password-file", "--etcd-password-file (MUSTER_ETCD_PASSWORD_FILE)"),
        ("--no-wrap", "--no-wrap (MUSTER_WRAP)"),
    ],
)
def test_a_flag_is_named_with_its_variable(flag: str, sentence: str) -> None:
    assert named(flag) == sentence


def test_every_setting_has_the_variable_of_its_flag() -> None:
    for kind in (Config, JobConfig, StoreConfig):
        for setting in settings_of(kind).values():
            assert setting.variable == variable_of(setting.flag)


def test_a_flag_that_a_sentence_names_is_there() -> None:
    given = {
        node.args[0].value
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "named"
        and isinstance(node.args[0], ast.Constant)
    }
    assert "--run-dir" in given
    assert given - FLAGS <= OF_OTHER_COMMANDS


def test_nobody_spells_a_variable_behind_its_flag_by_hand() -> None:
    spelled = re.compile(r"--[a-z0-9-]+ \(MUSTER_")
    hands = [path.name for path in FILES if spelled.search(path.read_text(encoding="utf-8"))]
    assert hands == []
