# SPDX-License-Identifier: Apache-2.0
"""What ``muster inject`` makes of launch lines: it takes them, or names the line that works."""

from __future__ import annotations

import json
from typing import Any

import pytest

from injection import cautions, launches
from injection.injection import Request, inject
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import (
    FLAGS,
    ON_LAUNCHES,
    manifest,
    of_sentences,
    refused,
    told,
)

NO_SIZE: dict[str, str | None] = {"min_nodes": None, "max_nodes": None}
STATIC = "--nnodes=2:4 --node_rank=$RANK --master_addr=$HOST --master-port 29500 t.py"


def about(text: str, /, **flags: str | None) -> list[str]:
    """The remarks on launch lines, each with its level."""
    return [f"{note.level}: {note}" for note in of_sentences(text, ON_LAUNCHES, **flags)]


def overridden(options: str, launcher: str = "torchrun") -> str:
    return f"note: container c: Muster overrides {options} of its {launcher} line"


JOBS_BOUNDS = "note: container c: the job's 2:4 overrides the number of nodes in its command"
APART = "note: " + cautions.APART.format(name="c", launcher="torchrun")
NO_LAUNCHER = "warning: " + cautions.NO_LAUNCHER.format(name="c")
OF_ACCELERATE = "--num_machines 2 --machine_rank 1 --main_process_ip h --rdzv_backend=c10d"
ENDPOINT = "--rdzv-id=1 --rdzv_endpoint=$H:29400 --rdzv-conf=timeout=900"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun --nproc-per-node=2 t.py", []),
        (f"torchrun {STATIC}", [overridden("--node-rank, --master-addr and --master-port")]),
        (f"/opt/bin/torchrun {ENDPOINT} t.py", [overridden("--rdzv-id and --rdzv-endpoint")]),
        ("torchrun --standalone t.py", [overridden("--standalone")]),
        ("torchrun --rdzv-conf=timeout=900 t.py", []),
        ("torchrun --rdzv-conf=is_host=1 t.py", [overridden("--rdzv-conf")]),
        ("torchrun --hitherto-unknown=1 --standalone t.py", [overridden("--standalone")]),
        ("torchrun t.py --node_rank=3 --standalone", []),
        ("python -m torch.distributed.run --master_addr x t.py", [overridden("--master-addr")]),
        ("torchrun --nnodes 3 t.py", [JOBS_BOUNDS]),
        ("torchrun --nnodes=$MIN:$MAX t.py", [JOBS_BOUNDS]),
        ("torchrun --nnodes=02:4 t.py", []),
        ("torchrun --nnodes=9:9 --nnodes=2:4 t.py", []),
        ("torchrun --nnodes=3 t.py --split 2:4", [JOBS_BOUNDS]),
        ("torchrun --local-addr=$IP t.py", ["warning: " + cautions.ADDRESS_WINS.format(name="c")]),
        ("conda run -n env torchrun --standalone t.py", [overridden("--standalone")]),
        (
            f"accelerate launch --multi_gpu {OF_ACCELERATE} --num_processes 16 t.py",
            [
                overridden(
                    "--machine-rank, --main-process-ip and --rdzv-backend", "accelerate launch"
                ),
                JOBS_BOUNDS,
            ],
        ),
        ("python3 -m accelerate.commands.launch --multi_gpu t.py", []),
        (
            "python3 -m accelerate.commands.launch t.py",
            ["warning: " + cautions.ONE_PROCESS.format(name="c")],
        ),
        ("accelerate launch --use_deepspeed --num_machines 1 t.py", [JOBS_BOUNDS]),
        ("accelerate launch --use_deepspeed --deepspeed_multinode_launcher standard t.py", []),
        ("accelerate-launch t.py", []),
        ("torchrun t.py fit --trainer.num_nodes 2", []),
        ("python -m torch.distributed.run t.py --trainer.num_nodes=2", []),
        ("bash run.sh --standalone", [NO_LAUNCHER]),
        ("python train.py --deepspeed ds.json", [NO_LAUNCHER]),
        ("pip install deepspeed && torchrun t.py --engine deepspeed", []),
        ("torchrun a.py && torchrun --standalone b.py", [overridden("--standalone")]),
        ("torchrun a.py && MUSTER_KEEP_FLAGS=1 torchrun --standalone b.py", [APART]),
        ("torchrun a.py && env MUSTER_KEEP_FLAGS=1 python -m torch.distributed.run b.py", [APART]),
        (
            "MUSTER_KEEP_FLAGS=1 torchrun --nnodes=1:1 b.py && torchrun --standalone a.py",
            [APART, overridden("--standalone")],
        ),
    ],
)
def test_a_line_is_taken_and_what_muster_overrides_is_said(line: str, said: list[str]) -> None:
    for command in (line.split(), ["sh", "-c", f"cd /app; set -e\nexec {line}"]):
        if "&&" in line or "conda" in line:
            command = ["bash", "-ec", line]
        assert about(manifest(command=command)) == said


def test_lines_within_lines_are_found() -> None:
    for script in (
        'srun bash -lc "torchrun --standalone t.py"',
        "torchrun \\\n  --standalone \\\n  t.py  # isn't elastic",
        'source /etc/profile\nif [ -n "$X" ]; then torchrun --standalone t.py; fi',
    ):
        assert about(manifest(command=["bash", "-c"], args=[script])) == [
            overridden("--standalone")
        ]


KEEPS = [{"name": "MUSTER_KEEP_FLAGS", "value": "1"}]


STANDALONE = ["torchrun", "--standalone", "t.py"]
IN_SHELL = "MUSTER_KEEP_FLAGS=1{} torchrun --standalone t.py"
BY_VALUE = {"name": "MUSTER_KEEP_FLAGS", "valueFrom": {"fieldRef": {}}}
LAUNCH = ["accelerate", "launch"]
REMOVE = (
    "has --standalone in its command, and keeps it, so the pod would not train with the others:"
    " remove it"
)
LEAVE = "accelerate launch, so its ranks meet without Muster: leave {} out"
BY_DEEPSPEED = "accelerate launch --use_deepspeed --num_machines 2 t.py"


@pytest.mark.parametrize(
    ("container", "flags", "remedy"),
    [
        ({"command": STANDALONE, "env": KEEPS}, {}, REMOVE),
        ({"command": STANDALONE, "env": [BY_VALUE]}, {}, REMOVE),
        ({"command": ["sh", "-c", f"export {IN_SHELL.format(';')}"]}, {}, REMOVE),
        ({"command": ["sh", "-c", IN_SHELL.format("")]}, {}, REMOVE),
        # Without muster-run no delivered torchrun is in the PATH.
        ({"command": STANDALONE}, {"wrap": "false"}, REMOVE),
        ({"command": LAUNCH, "env": KEEPS}, {}, LEAVE.format("MUSTER_KEEP_FLAGS")),
        ({"command": LAUNCH}, {"wrap": "false"}, LEAVE.format("--no-wrap")),
        ({"args": LAUNCH}, {}, "give the container its command"),
        (
            {"command": ["torchrun", "--tomorrow", "1", "--standalone", "t.py"]},
            {},
            "--tomorrow of its torchrun line is not known here, so --standalone behind it may be"
            " kept: write --tomorrow=VALUE",
        ),
        (
            {"command": BY_DEEPSPEED.split()},
            {},
            "add --deepspeed_multinode_launcher standard",
        ),
    ],
)
def test_a_line_that_bypasses_muster_is_refused_with_the_remedy(
    container: Any, flags: Any, remedy: str
) -> None:
    text = manifest(**container)
    line, allow = refused(text, **flags)
    assert line.endswith(remedy)
    assert "--allow-bypass injects all the same" in allow
    notes = inject(text, Request({**FLAGS, **flags}, {}, allow_bypass=True)).notes
    assert [note.level for note in notes if note in line] == ["warning"]


WORKS = "which sets the same variables, and keep the script's arguments: torchrun --nproc-per-node="


@pytest.mark.parametrize(
    ("command", "launcher", "line"),
    [
        (["deepspeed", "--hostfile", "h", "x/t.py", "--token", "s"], "deepspeed", "gpu x/t.py"),
        (
            ["sh", "-c", "cd /a && B=c exec /opt/bin/deepspeed --num_gpus 2 t.py"],
            "deepspeed",
            "2 t.py",
        ),
        (["tini", "--", "deepspeed", "t.py"], "deepspeed", "gpu t.py"),
        (["python", "-m", "deepspeed.launcher.runner", "--x", "t.py"], "deepspeed", "gpu t.py"),
        (["fabric", "run", "--num-nodes=2", "t.py"], "fabric run", "gpu t.py"),
        (["lightning", "run", "model", "./t.py"], "lightning run", "gpu ./t.py"),
        (
            ["python", "t.py", "fit", "--trainer.num_nodes=2", "--trainer.devices", "8"],
            "Lightning's own launcher",
            "gpu t.py",
        ),
    ],
)
def test_a_launcher_of_a_world_of_its_own_is_refused_with_the_line_that_works(
    command: list[str], launcher: str, line: str
) -> None:
    fault, _ = refused(manifest(command=command))
    assert f"container c starts {launcher}, whose ranks meet without Muster" in fault
    assert fault.endswith(f"{WORKS}{line} …")
    # First, whatever else is missing.
    assert refused(manifest(command=command), **NO_SIZE)[0] == fault


def test_deepspeed_in_an_mpijob_gets_no_host_list_and_no_word_of_one() -> None:
    text = CORPUS["mpi"].replace("[horovodrun, python, train.py]", "[deepspeed, train.py]")
    fault, _ = refused(text)
    assert fault.endswith("train.py …, in the pods of a Job or a PyTorchJob")
    notes = inject(text, Request(FLAGS, {}, allow_bypass=True)).notes
    assert not any("host list" in note for note in notes)


# --- min and max ---


def sized(text: str, /, **flags: str | None) -> tuple[str, str]:
    said = told(text, **flags)
    return said["MUSTER_MIN"], said["MUSTER_MAX"]


LEAST, MOST = {"name": "LEAST", "value": "1"}, {"name": "N", "value": "6"}
IN_ENV = {"name": "PET_NNODES", "value": "3:9"}


@pytest.mark.parametrize(
    ("line", "env", "flags", "size"),
    [
        ("torchrun --nnodes=2:8 t.py", [], {}, ("2", "8")),
        ("torchrun t.py", [IN_ENV], {}, ("3", "9")),
        ("torchrun --nnodes 2:8 t.py", [IN_ENV], {}, ("2", "8")),
        ("torchrun --nnodes=2:8 t.py", [], {"min_nodes": "1"}, ("1", "8")),
        ("torchrun --nnodes=2:8 t.py", [], {"max_nodes": "4"}, ("2", "4")),
        ("torchrun --nnodes=4 t.py", [], {}, ("4", "4")),
        ("torchrun --nnodes=${LEAST}:$(N) t.py", [LEAST, MOST], {}, ("1", "6")),
        ("torchrun --nnodes=$N t.py", [MOST], {}, ("6", "6")),
        ("accelerate launch --multi_gpu --num_machines 2 t.py", [], {}, ("2", "2")),
    ],
)
def test_a_launch_line_gives_min_and_max_if_nothing_else_does(
    line: str, env: Any, flags: dict[str, str | None], size: tuple[str, str]
) -> None:
    text = manifest(command=["sh", "-c", line], env=env)
    assert sized(text, **{**NO_SIZE, **flags}) == size
    fixed = [note for note in about(text, **{**NO_SIZE, **flags}) if "the job waits" in note]
    assert fixed == (
        ["warning: " + cautions.FIXED.format(name="c", nodes=size[0])] if size[0] == size[1] else []
    )


def test_an_elastic_policy_wins_over_the_launch_line() -> None:
    job = json.loads(json.dumps(CORPUS["elastic-pytorch-job"]))
    text = job.replace("torch.distributed.run, ", "torch.distributed.run, '--nnodes=3:5', ")
    assert sized(text, **NO_SIZE) == ("1", "2")


@pytest.mark.parametrize("line", ["torchrun --nnodes=$N t.py", "torchrun --nnodes=0 t.py"])
def test_a_number_that_only_a_shell_knows_is_no_size(line: str) -> None:
    first, second = refused(manifest(command=["sh", "-c", line]), **NO_SIZE)
    assert "--min (MUSTER_MIN) is missing" in first
    assert "--max (MUSTER_MAX) is missing" in second


def test_a_megabyte_of_words_is_searched_in_bounds() -> None:
    words = ["torchrun", "--standalone"] * 200_000
    found = launches.found_launches({"command": words, "args": ["torchrun " * 100_000]})
    assert len(found) == launches.LAUNCHERS_MOST
    assert all(len(one.words) <= launches.OPTIONS_MOST for one in found)
