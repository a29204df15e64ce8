# SPDX-License-Identifier: Apache-2.0
"""``as_user.py UID GID GROUPS UMASK MODULE ARGUMENT…``: run ``MODULE.main()`` as another user.

Root only. What is run is imported before: the other user may have no access to the Python of the
tests. ``GROUPS`` are more groups, with commas; ``UMASK`` is octal.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

PRELOADED = {
    "tests.support.sidecars.patient": (
        "console.agent",
        "difflib",
        "encodings.ascii",
        "encodings.idna",
        "importlib.readers",
    )
}
"""What a module imports only when it runs."""


def main() -> None:
    uid, gid, groups, umask, module, *arguments = sys.argv[1:]
    for name in PRELOADED.get(module, ()):
        import_module(name)
    run = import_module(module).main
    os.umask(int(umask, 8))
    os.setgroups([int(group) for group in groups.split(",") if group])
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    sys.argv = [module, *arguments]
    run()


if __name__ == "__main__":
    main()
