# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torchrun that starts workers one by one, warm or not, and scripts for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agent.rundir.programs import program
from launcher_shim.pod import launch
from launcher_shim.rundir import layout
from launcher_shim.warm.wire import OF_A_ROUND
from tests.support.sidecars.processes import PATIENCE_S

LAUNCHER = """
import json, os, subprocess, sys
def launch_agent(config, entrypoint, args):
    for line in sys.stdin:
        case = json.loads(line)
        with open(case["out"], "wb") as out, open(case["err"], "wb") as err:
            started = subprocess.Popen(
                [*case["before"], entrypoint, "-u", *case["words"]],
                env={**os.environ, **case["environ"]},
                stdout=out, stderr=err, start_new_session=True,
            )
        print(started.pid, flush=True)
        print(started.wait(), flush=True)
"""
TORCHRUN = """
import os, sys
from torch.distributed.launcher import api
"""
OF_REAL_TORCH = """
started_by = api.launch_agent
for cell in started_by.__closure__:
    if cell.cell_contents is started_by.__wrapped__:
        cell.cell_contents = launch_agent
"""
CALLS = """
class Config:
    def __init__(self):
        self.min_nodes = self.max_nodes = 2
        self.run_id, self.rdzv_backend, self.rdzv_endpoint = "none", "static", "head:29500"
        self.rdzv_configs, self.max_restarts, self.local_addr = {}, 0, None
config = Config()
api.launch_agent(config, os.environ.get("PYTHON_EXEC", sys.executable), [])
"""
DELIVERED = {
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "localhost:1",  # where nobody answers
    "PET_RDZV_ID": "digits",
    "PET_NNODES": "1:3",
    "MUSTER_ASKED_BY": "",
}
ROUND = {
    **dict.fromkeys(sorted(OF_A_ROUND - {"NODE_RANK", "MUSTER_WORKER"}), "1"),
    "RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "digits",
}
SAID = "muster-run: a worker starts without the zygote: "


class Ran(NamedTuple):
    status: int
    out: str
    err: str


class Torchrun:
    """One stand-in. ``real``: the zygote imports the real torch, not the text ``torch``."""

    def __init__(
        self,
        root: Path,
        *,
        warm: bool,
        real: bool = False,
        environ: Mapping[str, str] = {},
        torch: str = "",
    ) -> None:
        self._root, self._count = root, 0
        self.run_dir = run_dir = root / "run"
        image = root / "site-packages"
        programs, modules = run_dir / layout.PROGRAMS, run_dir / layout.MODULES
        notes = run_dir / layout.PLAIN_STARTS
        folders = [programs, modules, notes]
        if not real:
            folders.append(image / "torch/distributed/launcher")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        (programs / layout.TORCHRUN).write_bytes(program(layout.TORCHRUN))
        source = Path(launch.__file__).parent / layout.STARTUP
        (modules / layout.STARTUP).write_bytes(source.read_bytes())
        if not real:
            for name in ("torch", "torch/distributed", "torch/distributed/launcher"):
                (image / name / "__init__.py").write_text("")
            (image / "torch/__init__.py").write_text(torch)
            (image / "torch/distributed/launcher/api.py").write_text(LAUNCHER)
        self._process = subprocess.Popen(
            [sys.executable, "-c", TORCHRUN + (LAUNCHER + OF_REAL_TORCH) * real + CALLS],
            cwd=root,
            env={
                "PATH": os.defpath,
                "PYTHONPATH": f"{modules}" if real else f"{modules}{os.pathsep}{image}",
                "MUSTER_WARM": "1" if warm else "0",
                "MUSTER_RUN_DIR": str(run_dir),
                **DELIVERED,
                **environ,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def start(
        self,
        *words: str,
        before: Sequence[str] = (),
        meanwhile: Callable[[int, Path], None] = lambda pid, out: None,
        **environ: str,
    ) -> Ran:
        """Start a worker, and wait until it has ended."""
        self._count += 1
        out, err = (self._root / f"{self._count}.{name}" for name in ("out", "err"))
        case = {"out": str(out), "err": str(err), "words": words, "before": before}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({**case, "environ": {**ROUND, **environ}})
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        meanwhile(int(self._process.stdout.readline()), out)
        status = int(self._process.stdout.readline())
        return Ran(status, out.read_text(), err.read_text())


ENDS = {
    "well": "print('out'); import sys; print('err', file=sys.stderr)",
    "with a number": "import sys; sys.exit(3)",
    "with a text": "import sys; sys.exit('a text')",
    "at once": "import os; os._exit(4)",
    "by an exception": "def f():\n    raise ValueError('wrong')\nf()",
    "by two": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError(5) from e",
    "by Ctrl-C": "raise KeyboardInterrupt",
    "by a mistake": "print('never')\nif:\n",
    "by SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "by SIGSEGV": "import os; os.kill(os.getpid(), 11)",
    "by abort": "import os; os.abort()",
    "by SIGTERM": "import os; os.kill(os.getpid(), 15)",
    "by its own hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[1])\n1 / 0",
    "with handlers": "import atexit; atexit.register(print, 'at exit'); raise SystemExit(7)",
    "with a thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n1 / 0",
    "with output that is not flushed": "import os, sys\nsys.stdout.write('x' * 9000)\n",
}

FACTS = """
STATUS = "Uid Gid Umask SigBlk SigIgn CapEff CapBnd Threads Cpus_allowed".split()
import json, os, resource, signal, sys, threading
of = lambda name: [l for l in open("/proc/self/status").read().splitlines() if l.startswith(name)]
environ = {k: v for k, v in os.environ.items() if k not in ("MUSTER_WORKER", "MUSTER_WARM")}
main = sys.modules["__main__"]
print(json.dumps({
    "environ": environ,
    "worker": os.environ["MUSTER_WORKER"] == str(os.getpid()),
    "path": sys.path, "argv": sys.argv, "orig": sys.orig_argv, "flags": list(sys.flags),
    "executable": sys.executable, "prefix": sys.prefix,
    "meta": [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
    "hook": type(sys.excepthook).__name__,
    "main": [main.__name__, main.__file__, main.__spec__ is None, main.__package__, main.__doc__],
    "names": sorted(n for n in vars(main) if n.startswith("__")),
    "ours": [n for n in sys.modules if n.startswith("launcher_shim")],
    "signals": [str(signal.getsignal(n)).partition(" at ")[0] for n in signal.valid_signals()],
    "wakeup": signal.set_wakeup_fd(-1),
    "files": len(os.listdir("/proc/self/fd")),
    "limits": open("/proc/self/limits").read(),
    "status": [" ".join(of(name)[0].split()) for name in STATUS],
    # Two signals are the C library's own, once a process has had threads.
    "caught": int(of("SigCgt")[0].split()[1], 16) & ~(3 << 31),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "nice": os.nice(0), "cwd": os.getcwd(),
    "threads": threading.active_count(), "main_thread": threading.main_thread().name,
    "tty": [sys.stdin.isatty(), sys.stdout.isatty()],
    "through": [sys.stdout.write_through, sys.stderr.line_buffering],
    "cmdline": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
}, sort_keys=True))
"""
