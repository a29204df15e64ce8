# SPDX-License-Identifier: Apache-2.0
"""The imports of a zygote: modules that its workers need, and that a fork may have.

Two kinds do not: modules that start threads, which a fork does not have, and modules that read a
variable of the round, such as ``RANK``, which the zygote does not have yet. An import cannot be
undone: a zygote that finds one starts once more without it.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from typing import Any, Iterator, List, Mapping, Optional, Sequence, Set

from launcher_shim.pod.warm.circumstances import OF_A_ROUND, is_of_a_round

FIRST = ("numpy", "torch", "torch.distributed")
"""The first imports: the threads that numpy's mathematics starts survive a fork."""
MAY_START_THREADS = frozenset({"numpy"})
NEEDED = frozenset({"torch"})
"""Without these there is nothing to gain."""
INSTALLED = ("site-packages", "dist-packages")


class Unfit(Exception):
    """A module that must not be imported before a fork; ``package`` is what to do without."""

    def __init__(self, package: str, why: str) -> None:
        super().__init__(f"{package} {why}")
        self.package = package


_read: Set[str] = set()


def _watching(plain: type) -> type:
    """Return the class of an environment that notes which variables of the round are read."""

    class WatchedEnvironment(plain):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            self._note(name)
            return super().__getitem__(name)

        def __contains__(self, name: object) -> bool:
            self._note(str(name))
            return bool(super().__contains__(name))

        def _note(self, name: str) -> None:
            # A pod's own NCCL_ or GLOO_ variable is known here; a copy of all reads it, too.
            known = name not in OF_A_ROUND and self.encodekey(name) in self._data
            if is_of_a_round(name) and not known:
                _read.add(name)

    return WatchedEnvironment


def load(names: Sequence[str], without: Set[str]) -> None:
    """Import modules, in this order; raises ``Unfit`` with the first that may not be.

    A module that cannot be imported is left to the worker, which has the traceback then.
    """
    kind = type(os.environ)
    os.environ.__class__ = _watching(kind)
    try:
        for name in names:
            package = _package(name)
            if package in without or name in sys.modules:
                continue
            threads = _threads()
            _read.clear()
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:
                sys.stderr.write("muster-run: the zygote does not import %s: %r\n" % (name, error))
            if _read:
                raise Unfit(package, "reads %s as it is imported" % ", ".join(sorted(_read)))
            if _threads() > threads and package not in MAY_START_THREADS:
                raise Unfit(package, "starts a thread as it is imported")
            if _has_device():
                raise Unfit(package, "initialises a device as it is imported")
    finally:
        os.environ.__class__ = kind
    gc.collect()
    gc.freeze()


def _package(name: str) -> str:
    """Return what is left out if the module is unfit: its package, or that part of a needed one."""
    first, *more = name.split(".")
    return f"{first}.{more[0]}" if first in NEEDED and more and name not in FIRST else first


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_device() -> bool:
    cuda: Any = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def installed(modules: Mapping[str, Any]) -> List[str]:
    """Return the modules of installed packages, in the order of their import: pure.

    Modules of the user's own folders may change between two starts; they are none of them.
    """
    return list(_installed(modules))


def _installed(modules: Mapping[str, Any]) -> Iterator[str]:
    for name, module in list(modules.items()):
        spec: Optional[Any] = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        parts = origin.split(os.sep) if isinstance(origin, str) else []
        if any(one in parts for one in INSTALLED) and getattr(spec, "name", "") == name:
            yield name
