# SPDX-License-Identifier: Apache-2.0
"""Starts of workers by the real zygote and torch, beside fresh ones, and how they differ."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from pathlib import Path
from typing import NamedTuple

from tests.support.training.starting import ENDS, FACTS, SAID, Torchrun

IMPORTS = "import numpy, torch, torch.distributed\n"
"""What the zygote has imported as well."""

# The one thread of numpy's mathematics is made by a fork's first use of it.
GIVEN = {
    "variables, path, flags, signals, files, limits": FACTS,
    "the same after torch is imported": IMPORTS + FACTS.replace(" Threads", ""),
    "modules after the same imports": "import sys\n"
    "plain = lambda names: sorted(n for n in names if not n.startswith('encodings.'))\n"
    f"{IMPORTS}before = set(sys.modules)\nprint(plain(before))\nimport torch.utils.data\n"
    "print(plain(set(sys.modules) - before))\n",
    "descriptors": "import os, fcntl\n"
    "for n in sorted(map(int, os.listdir('/proc/self/fd')))[:-1]:\n"
    "    print(n, fcntl.fcntl(n, fcntl.F_GETFD), fcntl.fcntl(n, fcntl.F_GETFL),"
    " os.readlink(f'/proc/self/fd/{n}')"
    ".rpartition('/')[2]"
    ".partition(':')[0])\n",
    "the kernel's settings": "import ctypes\n"
    "for n in ('comm', 'oom_score_adj', 'coredump_filter', 'timerslack_ns', 'cpuset',"
    " 'sched', 'loginuid', 'personality', 'setgroups'):\n"
    "    try: text = open('/proc/self/' + n).read()\n"
    "    except OSError as error: text = type(error).__name__\n"
    "    print(n, [l for l in text.splitlines() if n != 'sched' or l.startswith(('policy', 'prio'))"
    "])\n"
    "c = ctypes.CDLL(None)\n"
    "print([c.prctl(n, 0, 0, 0, 0) for n in (3, 7, 21, 23, 27, 30, 39, 42)])\n"
    "death = ctypes.c_int(); c.prctl(2, ctypes.byref(death)); print(death.value)\n",
    "the interpreter's settings": "import gc, sys, warnings, faulthandler, logging, threading\n"
    "import locale, os, resource, tracemalloc, asyncio, random, atexit\n"
    "print(gc.isenabled(), gc.get_threshold(), gc.callbacks, gc.get_debug())\n"
    "print(sys.getrecursionlimit(), sys.getswitchinterval(), sys.warnoptions, sys._xoptions)\n"
    "print([f[:2] for f in warnings.filters if f[3] != 'numpy'][-5:])\n"
    "print(faulthandler.is_enabled(), logging.root.handlers, logging.root.level)\n"
    "print(locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding(), sys.stdout.encoding)\n"
    "print(sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.excepthook)\n"
    "print(tracemalloc.is_tracing(), sys.get_asyncgen_hooks(), threading.stack_size())\n"
    "print(sys.displayhook, sys.unraisablehook, sys.breakpointhook, sys.path_hooks[:1])\n"
    "print(threading.main_thread().ident == threading.get_ident(),"
    " [t.name for t in threading.enumerate()])\n"
    "print(threading.get_native_id() == os.getpid(), sys.dont_write_bytecode, sys.intern('a'))\n",
    "standard input": "import sys\nprint(sys.stdin.read(), sys.stdin.name, sys.stdin.mode)\n",
}
"""Scripts that print what they were given; equal for a fresh and a warm worker."""

TRACEBACKS = {
    "of chained exceptions": "def f():\n    try:\n        {}['a']\n    except KeyError as e:\n"
    "        raise ValueError('x') from e\nf()\n",
    "of a group": "raise ExceptionGroup('both', [ValueError(1), TypeError(2)])\n"
    if sys.version_info >= (3, 11)
    else "raise ValueError\n",
    "of a deep recursion": "def f(n): return f(n + 1)\n"
    "try: f(0)\nexcept RecursionError as error: print(error)\n",
    "of a thread": "import threading\n"
    "t = threading.Thread(target=lambda: 1 / 0, name='t'); t.start(); t.join()\n",
    "with a note": "e = ValueError('x')\ngetattr(e, 'add_note', print)('noted')\nraise e\n",
    "of a warning": "import warnings\nwarnings.warn('careful')\n"
    "warnings.warn('old', FutureWarning)\n",
    "that is logged": "import logging\n"
    "try: 1 / 0\nexcept ZeroDivisionError: logging.exception('x')\n",
    "of torch": f"{IMPORTS}torch.ones(2) @ torch.ones(3)\n",
    "of an operation in the backward pass": IMPORTS + "class F(torch.autograd.Function):\n"
    "    @staticmethod\n    def forward(c, x): return x * 1\n"
    "    @staticmethod\n    def backward(c, g): raise RuntimeError('in backward')\n"
    "F.apply(torch.ones(1, requires_grad=True)).backward()\n",
    "of record": "from torch.distributed.elastic.multiprocessing.errors import record\n"
    "import json, os, sys, tempfile\n"
    "os.environ['TORCHELASTIC_ERROR_FILE'] = f = tempfile.mktemp()\n"
    "@record\ndef main(): raise ValueError('recorded')\n"
    "try: main()\nexcept ValueError: pass\n"
    "print(json.load(open(f))['message']['message'])\n",
}

COMPUTES = {
    "torch's numbers from a seed": f"{IMPORTS}torch.manual_seed(7)\n"
    "print(torch.randn(3).tolist(), torch.get_default_dtype(), torch.get_rng_state().sum())\n",
    "OpenMP: threads": IMPORTS + "a = torch.ones(2000, 2000)\n"
    "print((a @ a).sum().item(), torch.get_num_threads(), torch.get_num_interop_threads())\n"
    "torch.set_num_threads(2); print((a @ a).sum().item(), a.exp().sum().item())\n"
    "import os; print(torch.get_num_threads(), len(os.sched_getaffinity(0)))\n",
    "numpy: threads": f"{IMPORTS}a = numpy.ones((800, 800)); print((a @ a).sum())\n",
    "training": IMPORTS
    + "torch.manual_seed(1); m = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(),"
    " torch.nn.Linear(64, 1)); o = torch.optim.AdamW(m.parameters())\n"
    "for _ in range(20): o.zero_grad(); l = m(torch.ones(8, 64)).sum(); l.backward(); o.step()\n"
    "print(l.item())\n",
    "a process group": IMPORTS
    + "import os\nos.environ.update(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_PORT='0',"
    " TORCHELASTIC_USE_AGENT_STORE='False')\n"
    "torch.distributed.init_process_group('gloo'); a = torch.ones(3)\n"
    "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1)); m(a).sum().backward()\n"
    "torch.distributed.all_reduce(a); print(a, m.module.weight.grad)\n"
    "torch.distributed.destroy_process_group()\n",
}

PROCESSES = {
    "multiprocessing": "import multiprocessing as mp, os, sys\n"
    "def child(q): q.put((__name__, sys.modules['__main__'].__name__, mp.parent_process().name))\n"
    "def square(n): return n * n\n"
    "if __name__ == '__main__':\n"
    "    for kind in ('fork', 'spawn', 'forkserver'):\n"
    "        c = mp.get_context(kind); q = c.Queue(); p = c.Process(target=child, args=(q,))\n"
    "        p.start(); print(kind, q.get(timeout=300)); p.join(); print(p.exitcode, p.name)\n"
    "    with mp.Pool(2) as pool: print(pool.map(square, range(9)))\n"
    "    print(mp.get_start_method(), mp.current_process().name, os.getppid() > 1)\n",
    "torch.multiprocessing": IMPORTS + "import torch.multiprocessing as mp\n"
    "def child(q, t): t.add_(1); q.put(t.tolist())\n"
    "if __name__ == '__main__':\n"
    "    t = torch.ones(3).share_memory_(); q = mp.get_context('fork').Queue()\n"
    "    p = mp.get_context('fork').Process(target=child, args=(q, t)); p.start()\n"
    "    print(q.get(timeout=300), t); p.join(); print(p.exitcode)\n",
    "a DataLoader": IMPORTS + "from torch.utils.data import DataLoader, Dataset, get_worker_info\n"
    "class Rows(Dataset):\n"
    "    def __len__(self): return 32\n"
    "    def __getitem__(self, i): return i, get_worker_info().id\n"
    "if __name__ == '__main__':\n"
    "    torch.manual_seed(3)\n"
    "    for more in ({}, {'persistent_workers': True, 'multiprocessing_context': 'fork'}):\n"
    "        d = DataLoader(Rows(), 4, shuffle=True, num_workers=2, **more)\n"
    "        print([b[0].tolist() for b in d], [b[1].tolist() for b in d])\n",
    "a DataLoader that fails": IMPORTS + "from torch.utils.data import DataLoader, Dataset\n"
    "class Rows(Dataset):\n"
    "    def __len__(self): return 32\n"
    "    def __getitem__(self, i): raise OSError(5, 'no such row')\n"
    "try: list(DataLoader(Rows(), 4, num_workers=1))\n"
    "except OSError as error: print(str(error).splitlines()[0], str(error).splitlines()[-1])\n",
    "programs": "import subprocess, sys, os\n"
    "print(subprocess.run([sys.executable, '-c', 'import sys, os; print(sys.path[0],"
    ' sorted(k for k in os.environ if k not in ("MUSTER_WORKER", "MUSTER_WARM")))\'],'
    " capture_output=True, text=True))\n"
    "print(subprocess.run('ulimit -a; umask; ls -l /proc/self/fd | wc -l', shell=True,"
    " capture_output=True, text=True).stdout)\n",
    "torch.compile": IMPORTS
    + "import os, tempfile\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = tempfile.mkdtemp()\n"
    "if __name__ == '__main__':\n"
    "    @torch.compile(fullgraph=True)\n"
    "    def f(x, y): return torch.sin(x) @ y + torch.relu(x).sum()\n"
    "    a, b = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)\n"
    "    r = f(a, b).sum(); r.backward(); print(r.item(), a.grad.sum().item())\n"
    "    print(torch._dynamo.utils.counters['stats']['unique_graphs'])\n",
}

CASES: dict[str, str] = {
    **GIVEN,
    **{f"ends {how}": script for how, script in ENDS.items()},
    **{f"ends {how}, with torch": f"{IMPORTS}{ENDS[how]}" for how in ("well", "by SIGSEGV")},
    **{f"traceback {of}": script for of, script in TRACEBACKS.items()},
    **COMPUTES,
    **PROCESSES,
}
SLOW = frozenset({"torch.compile"})
"""Compilers take most of the time of these: once in a run is enough."""
WITH_INPUT = ["sh", "-c", 'unset PWD OLDPWD SHLVL _; echo typed | exec "$@"', "sh"]


class Compared(NamedTuple):
    """One case, and what differs; empty for nothing."""

    case: str
    differs: str


def compared(
    folder: Path, fresh: Torchrun, warm: Torchrun, cases: Iterable[str]
) -> Iterator[Compared]:
    """Start a fresh and a warm worker of each case."""
    for case in cases:
        script = folder / "script.py"
        script.write_text(CASES[case])
        before = WITH_INPUT if case == "standard input" else ()
        first, second = (one.start(str(script), before=before) for one in (fresh, warm))
        differs = "started plainly: " + second.err if SAID in second.err else ""
        for name, one, other in zip(first._fields, first, second, strict=True):
            if one != other:
                differs += f"{name}: {_difference(one, other)}"
        yield Compared(case, differs)


def in_turns(starts: int) -> list[str]:
    """Return the cases of so many starts, half of them warm: all of them, in turns."""
    again = [case for case in CASES if case not in SLOW]
    return list(islice(chain(CASES, cycle(again)), starts // 2))


def _difference(one: object, other: object) -> str:
    """Return the words that only one of two texts has, in their order."""
    words, others = str(one).split(), str(other).split()
    fresh = " ".join(word for word in words if word not in others)
    warm = " ".join(word for word in others if word not in words)
    return f"fresh has {fresh or 'the same words'}, warm has {warm or 'the same words'}; "
