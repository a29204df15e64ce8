# SPDX-License-Identifier: Apache-2.0
"""The generated stubs are those of the committed proto file, and claim no name of etcd's."""

from __future__ import annotations

import re
from pathlib import Path

import rdzv.store
from rdzv.store import etcd_pb2

PROTO = Path(rdzv.store.__file__).parent / "proto" / "etcd.proto"
FIELD = re.compile(r"^\s+(?:repeated )?\w+ (?P<name>\w+) = (?P<number>\d+);", re.MULTILINE)


def test_the_stubs_are_fresh() -> None:
    text = PROTO.read_text()
    declared = {
        block[0]: {match["name"]: int(match["number"]) for match in FIELD.finditer(block[1])}
        for block in re.findall(r"^message (\w+) \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    }
    generated = {
        name: {field.name: field.number for field in message.fields}
        for name, message in etcd_pb2.DESCRIPTOR.message_types_by_name.items()
    }
    assert generated == declared, "run scripts/generate-stubs"


def test_the_stubs_can_live_beside_another_etcd_library() -> None:
    assert etcd_pb2.DESCRIPTOR.package == "muster.etcd"
    assert etcd_pb2.DESCRIPTOR.name == "rdzv/store/etcd.proto"
