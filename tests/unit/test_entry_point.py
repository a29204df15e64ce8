# SPDX-License-Identifier: Apache-2.0
"""Which horovodrun is started by its entry point: the script that an installer writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_shim.pod.horovod_launch import SCRIPT_BYTES, started_lightly
from launcher_shim.pod.launch import Launch, read_launch

INSTALLERS = {
    "pip": """\
import sys
from horovod.runner.launch import run_commandline
if __name__ == '__main__':
    sys.argv[0] = sys.argv[0].removesuffix('.exe')
    sys.exit(run_commandline())
""",
    "older pip": """\
# -*- coding: utf-8 -*-
import re
import sys
from horovod.runner.launch import run_commandline
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(run_commandline())
""",
    "installer": """\
# -*- coding: utf-8 -*-
import re
import sys
from horovod.runner.launch import run_commandline
if __name__ == "__main__":
    sys.argv[0] = re.sub(r"(-script\\.pyw|\\.exe)?$", "", sys.argv[0])
    sys.exit(run_commandline())
""",
    "uv": """\
# -*- coding: utf-8 -*-
import sys
from horovod.runner.launch import run_commandline
if __name__ == "__main__":
    if sys.argv[0].endswith("-script.pyw"):
        sys.argv[0] = sys.argv[0][:-11]
    elif sys.argv[0].endswith(".exe"):
        sys.argv[0] = sys.argv[0][:-4]
    sys.exit(run_commandline())
""",
    "conda": """\
# -*- coding: utf-8 -*-
import re
import sys

from horovod.runner.launch import run_commandline

if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw?|\\.exe)?$', '', sys.argv[0])
    sys.exit(run_commandline())
""",
}
PIP = INSTALLERS["pip"]
SPARING = {
    "distlib": """\
# -*- coding: utf-8 -*-
import re
import sys
if __name__ == '__main__':
    from horovod.runner.launch import run_commandline
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(run_commandline())
""",
    "setuptools": """\
# EASY-INSTALL-ENTRY-SCRIPT: 'horovod==0.28.1','console_scripts','horovodrun'
import re
import sys
from importlib.metadata import distribution

if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw?|\\.exe)?$', '', sys.argv[0])
    sys.exit(load_entry_point('horovod==0.28.1', 'console_scripts', 'horovodrun')())
""",
}
"""Of installers, too: their children import no more of horovodrun than they do without a script."""


def edited(line: str, *instead: str) -> str:
    """The script of pip's with other lines in the place of one."""
    assert f"{line}\n" in PIP
    return PIP.replace(f"{line}\n", "".join(f"{one}\n" for one in instead))


IMPORT = "from horovod.runner.launch import run_commandline"
GUARD = "if __name__ == '__main__':"
EXIT = "    sys.exit(run_commandline())"
EDITED = {
    "sets a variable": edited(IMPORT, "import os", "os.environ['A'] = 'b'", IMPORT),
    "sets it in the import's line": edited(IMPORT, f"{IMPORT}; sys.argv.append('-v')"),
    "imports another": edited(IMPORT, IMPORT, "import patches"),
    "imports under another name": edited(IMPORT, f"{IMPORT} as run", "run_commandline = run"),
    "patches behind the guard": edited(GUARD, GUARD, "    patches.apply()"),
    "sets argv": edited(EXIT, "    sys.argv[1:1] = ['--verbose']", EXIT),
    "goes on after it": edited(EXIT, "    run_commandline()", "    print('done')"),
    "a function between": edited(GUARD, "def log(): pass", GUARD),
    "an end of its own": edited(EXIT, "    sys.exit(run_commandline() or 3)"),
    "what follows": f"{PIP}\nfinally_do()\n",
    "no guard": edited(GUARD, "if True:"),
    "no end": edited(EXIT),
    "in a string": f"TEXT = '''\n{PIP}'''\n",
    "longer than is read": PIP + "#" * (SCRIPT_BYTES - 100) + "\nfinally_do()\n",
}
OTHER = """\
from other import run_commandline
if __name__ == '__main__':
    run_commandline()
"""
OWN = """\
import os
from horovod.runner.launch import run_commandline
os.environ["HOROVOD_LOG_LEVEL"] = "debug"
run_commandline()
"""


@pytest.mark.parametrize(
    ("shebang", "interpreter"),
    [
        ("#!/opt/venv/bin/python", ["/opt/venv/bin/python"]),
        ("#!/opt/conda/bin/python3.10", ["/opt/conda/bin/python3.10"]),
        ("#! /usr/bin/python3 -s", ["/usr/bin/python3", "-s"]),
        ("#!/usr/bin/env python3", ["/usr/bin/env", "python3"]),
        ("#!/usr/bin/env -S -i python3", ["/usr/bin/env", "-S -i python3"]),
    ],
)
@pytest.mark.parametrize("body", INSTALLERS.values(), ids=INSTALLERS)
def test_an_installers_script_is_started_by_its_entry_point(
    tmp_path: Path, shebang: str, interpreter: list[str], body: str
) -> None:
    program = tmp_path / "horovodrun"
    program.write_text(f"{shebang}\n{body}")
    words = started_lightly(str(program))
    assert words[: len(interpreter) + 1] == [*interpreter, "-c"]
    assert words[-1] == str(program)
    # So muster-run knows it among the processes.
    assert read_launch(7, [*words, "-np", "2"], {}) == Launch("horovodrun", 7)


@pytest.mark.parametrize(
    "content",
    [
        f'#!/bin/sh\nexec /opt/venv/bin/horovodrun -v "$@"\n{PIP}',
        f"#!/usr/bin/env bash\n{PIP}",
        f"#!/usr/bin/python3\n{OWN}",
        f"#!/usr/bin/python3\n{OTHER}",
        f"#!/bin/sh\n'''exec' '/a long/bin/python' \"$0\" \"$@\"\n' '''\n{PIP}",
        "\x7fELF",
        "",
    ],
)
def test_anything_else_is_started_as_it_is(tmp_path: Path, content: str) -> None:
    program = tmp_path / "horovodrun"
    program.write_text(content)
    assert started_lightly(str(program)) == [str(program)]


@pytest.mark.parametrize("body", [*EDITED.values(), *SPARING.values()], ids=[*EDITED, *SPARING])
def test_so_is_a_script_that_does_more_or_other_things(tmp_path: Path, body: str) -> None:
    program = tmp_path / "horovodrun"
    program.write_text(f"#!/usr/bin/python3\n{body}")
    assert started_lightly(str(program)) == [str(program)]


def test_so_is_what_cannot_be_read(tmp_path: Path) -> None:
    assert started_lightly(str(tmp_path / "none")) == [str(tmp_path / "none")]
