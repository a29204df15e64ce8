# SPDX-License-Identifier: Apache-2.0
"""The first lines of each Python in a training container, delivered beside ``import muster``.

Python looks for a module of this name when it starts. This one sets ``NODE_RANK`` in a worker, and
has torch's launcher prepared where that is imported. Then it runs the next one of the path, as if
it were absent itself. It is short because Python may have to compile it each time.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ARCHIVE = os.path.join(os.path.dirname(HERE), "bin", "torchrun")
"""The program with the modules of Muster that these hooks need."""
RAN = sys.__dict__.setdefault("muster_folders", [])
"""Folders of the files like this that have run. A user's ``sitecustomize`` that runs the next one
may find one of them again."""
LAUNCHERS = {"torch.distributed.launcher.api", "accelerate.commands.launch"}
"""Modules that are prepared when they are imported."""


class OnImport:
    """Import hook that has launchers prepared."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Find a launcher; see ``importlib.abc.MetaPathFinder``."""
        if name not in LAUNCHERS:
            return None
        LAUNCHERS.remove(name)  # the search below comes here, too
        sys.path.insert(0, ARCHIVE)
        try:
            from launcher_shim.pod import torchrun

            return torchrun.found(name)
        except Exception as error:
            sys.stderr.write("muster-run: %s is left as it is: %r\n" % (name, error))
            return None
        finally:
            LAUNCHERS.add(name)
            sys.path.remove(ARCHIVE)


class OnError:
    """Hook for the exception that ends a worker: reports it to the sidecar, and prints it."""

    def __init__(self):  # type: ignore[no-untyped-def]
        self.before = sys.excepthook
        self.pid = os.getpid()

    def __call__(self, kind, error, trace):  # type: ignore[no-untyped-def]
        """See ``sys.excepthook``."""
        # In no child that it has forked. After Ctrl-C, an import would change Python's exit status.
        if os.getpid() == self.pid and not issubclass(kind, KeyboardInterrupt):
            self.report(kind, error, trace)  # type: ignore[no-untyped-call]
        self.before(kind, error, trace)

    def report(self, kind, error, trace):  # type: ignore[no-untyped-def]
        """Leave the error in the run directory; the user's output stays as it is."""
        sys.path.insert(0, ARCHIVE)
        try:
            from launcher_shim.rundir import rank_reports

            rank_reports.report_error(kind, error, trace, os.environ)
        except Exception as fault:
            sys.stderr.write(
                "muster-run: the sidecar does not learn of this error: %r\n" % (fault,)
            )
        finally:
            sys.path.remove(ARCHIVE)


class OnNext:
    """Import hook that finds the next ``sitecustomize``."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Search the path without the folders of Muster; see ``importlib.abc.MetaPathFinder``."""
        if name != "sitecustomize":
            return None
        sys.meta_path.remove(self)
        whole = sys.path[:]
        sys.path[:] = [one for one in whole if os.path.abspath(one) not in RAN]
        try:
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
            spec = next(filter(None, found), None)
        finally:
            sys.path[:] = whole
        if spec is None:
            raise ImportError("there is no other one", name=name)
        return spec


def as_worker():  # type: ignore[no-untyped-def]
    """Prepare this process as a worker, if torchrun has started it."""
    if "GROUP_RANK" not in os.environ:
        return
    os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])
    # A program that a worker starts has the same variables.
    if os.environ.setdefault("MUSTER_WORKER", str(os.getpid())) == str(os.getpid()):
        sys.excepthook = OnError()  # type: ignore[no-untyped-call]


if __name__ == "sitecustomize":
    if RAN:
        pass
    elif "MUSTER_ZYGOTE" in os.environ:
        sys.__dict__["muster_as_worker"] = as_worker
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        as_worker()  # type: ignore[no-untyped-call]
    elif "PET_RDZV_ENDPOINT" in os.environ:
        sys.meta_path.insert(0, OnImport())
    RAN.append(HERE)
    sys.meta_path.insert(0, OnNext())
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")
