# SPDX-License-Identifier: Apache-2.0
"""The command after ``--``."""

import pytest

from console.local.launch.launch_line import read_launch_line
from rdzv.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "slots"),
    [
        ("torchrun train.py", 1),
        ("/opt/env/bin/torchrun --nproc-per-node=2 train.py --nnodes=9", 2),
        ("torchrun --nproc_per_node 4 train.py", 4),
        ("torchrun --nproc 4 -r 3 -m package.train --rdzv-id=x", 4),
        ("torchrun --max-restarts 3 train.py --standalone", 1),
        ("torchrun --no-python --tee 3 ./train.sh --node-rank 1", 1),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", 2),
        ("/usr/bin/python3.12 -u -m torch.distributed.run train.py", 1),
        ("torchrun -- train.py --nnodes 3", 1),
    ],
)
def test_what_each_node_runs(command: str, slots: int) -> None:
    line = read_launch_line(command.split())
    assert line.slots == slots
    assert line.command == tuple(command.split())


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("torchrun --nnodes=2 train.py", "--nnodes cannot be given here: .*--min and --max"),
        ("torchrun --nno 1:2 train.py", "--nnodes cannot"),
        ("torchrun --max-restarts 3 --nnodes 2 train.py", "--nnodes cannot"),
        ("torchrun --rdzv-backend=c10d train.py", "--rdzv-backend cannot"),
        ("torchrun --rdzv_endpoint host:1 train.py", "--rdzv-endpoint cannot"),
        ("torchrun --rdzv-id=7 train.py", "--rdzv-id cannot be given here: .*--job"),
        ("torchrun --rdzv_conf=is_host=1 train.py", "--rdzv-conf cannot"),
        ("torchrun --node_rank=0 train.py", "--node-rank cannot"),
        ("torchrun --master-addr=::1 train.py", "--master-addr cannot"),
        ("torchrun --master_port 29500 train.py", "--master-port cannot"),
        ("torchrun --stand train.py", "--standalone cannot"),
        ("python -m torch.distributed.run --nnodes=2 train.py", "--nnodes cannot"),
        ("torchrun --nproc-per-node=gpu train.py", "give a number"),
        ("torchrun --nproc-per-node=0 train.py", "give a number"),
        ("torchrun --nproc-per-node", "give a number"),
        ("python train.py", "no launcher"),
        ("python -m train", "no launcher"),
        ("python -m horovod.runner.gloo_run", "no launcher"),
        ("", "no command"),
    ],
)
def test_what_is_refused_says_why_and_what_to_do_instead(command: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        read_launch_line(command.split())
    assert "\n" not in str(refused.value)
