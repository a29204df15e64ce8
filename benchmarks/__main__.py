# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks [NAME …] [--report DIR]``: run benchmarks, print one JSON line a figure.

Each benchmark is a module with ``async def measure() -> list[Figure]``. Ends with 1 if a figure
misses its bar.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from importlib import import_module
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.picture import draw_figures

BENCHMARKS = {
    "c10d": "the endpoint's operations beside torch's own server and a raw etcd transaction, 3 min",
    "data": "a sampler of ten million and of a thousand million samples, beside torch's, 1 min",
    "join": "64 and 256 of torch's handlers join at once, beside native c10d, 6 min",
    "recover": "rank 0 killed under a real torchrun job, beside a bare restart, 6 min",
    "losses": "a node is cut off, and all on a node is killed; needs root, 6 min",
    "gather": "eight nodes come in two minutes, beside no gathering and native torchrun, 11 min",
    "shards": "four nodes of different pace, two killed, one comes; 100 ranks at once, 3 min",
    "stuck": "one of four ranks comes to stand still, 100 times; 10,000 calm steps, 50 min",
    "step": "a step boundary with no drain going, beside a loop without it, 10 s",
    "drain": "a notice, the save of all, and the next step, beside native SIGTERM, 7 min",
    "in_place": "worlds change in place: joins, drains, losses, 8 ranks, a state of 1 GB, 25 min",
    "horovod": "hosts leave and join a real horovodrun, beside one on OpenSSH, 15 min",
    "tunnel": "a command and its output through the tunnel, beside OpenSSH, 1 min",
    "hosts": "a membership change reaches 32 host lists; the script that prints one, 1 min",
    "store": "the etcd client beside the packages etcd3 and aetcd, and after a leader kill, 5 min",
    "scale": "1,000 registrars and watchers on one etcd: join, rest, leave, return, 15 min",
    "first_hour": "pip install to the first picture; a crash to its error on the screen, 3 min",
    "footprint": "memory, CPU at rest and start of one sidecar, 2 min",
    "admission": "1,000 pods of a Job through the webhook, and the API server's view, 2 min",
    "pod": "a pod is deleted in a real cluster, beside no Muster; needs root, 15 min",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure Muster beside a baseline of the same run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:10} {what}" for name, what in BENCHMARKS.items()),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="[default: all]")
    parser.add_argument("--report", type=Path, metavar="DIR", help="also draw each as DIR/NAME.svg")
    arguments = parser.parse_args()
    names = arguments.names or list(BENCHMARKS)
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: give {', '.join(BENCHMARKS)}")
    ok = True
    for name in names:
        print(f"{name}: {BENCHMARKS[name]}", file=sys.stderr)
        try:
            figures = asyncio.run(_measure(import_module(f"benchmarks.{name}").measure))
        except (asyncio.CancelledError, KeyboardInterrupt):
            print(f"{name}: ended by a signal", file=sys.stderr)
            return 130
        for figure in figures:
            print(figure.line(), flush=True)
            ok = ok and figure.ok
        if arguments.report is not None:
            arguments.report.mkdir(parents=True, exist_ok=True)
            picture = arguments.report / f"{name}.svg"
            what, _, _ = BENCHMARKS[name].rpartition(", ")
            picture.write_text(draw_figures(f"{name}: {what}", figures))
            print(f"picture: {picture}", file=sys.stderr)
    return 0 if ok else 1


async def _measure(measure: Callable[[], Coroutine[None, None, list[Figure]]]) -> list[Figure]:
    """Run a benchmark; SIGTERM cancels it as Ctrl-C does, so that none of its processes is left."""
    measuring = asyncio.ensure_future(measure())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measuring.cancel)
    return await measuring


if __name__ == "__main__":
    sys.exit(main())
