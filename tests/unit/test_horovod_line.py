# SPDX-License-Identifier: Apache-2.0
"""What horovodrun is told in a launcher's container, and which horovodrun that is."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.horovod.launcher import HOROVODRUN, SCRIPT_BYTES, started_lightly
from launcher_shim.horovod.line import (
    LINE_MAX_BYTES,
    JobSize,
    LineError,
    arguments,
    environment,
    read_options,
)
from launcher_shim.pod.launch import Launch, read_launch
from launcher_shim.pod.launchers import serves_workers

SIZE = JobSize(1, 3, 1)
SCRIPT = "/run/discover_hosts.sh"
AS_USERS_HAVE_IT = (
    "-np 2 --min-np 1 --max-np 3 --host-discovery-script /etc/mpi/discover_hosts.sh"
    " python /examples/elastic/train.py -np 9"
)


def told(line: str, size: JobSize = SIZE) -> tuple[dict[str, str | None], str]:
    """The options that horovodrun gets, and the worker's command."""
    made, _ = arguments(line.split(), SCRIPT, "eth0", size)
    options = read_options(made)
    values = {option.name: option.value for option in options.options}
    assert len(values) == len(options.options), "an option twice"
    return values, " ".join(options.command)


def test_the_operators_host_list_is_overruled_and_the_users_counts_are_kept() -> None:
    made, said = arguments(AS_USERS_HAVE_IT.split(), SCRIPT, "eth0", SIZE)
    options, command = told(AS_USERS_HAVE_IT)
    assert options == {
        **{"-np": "2", "--min-np": "1", "--max-np": "3"},
        **{"--host-discovery-script": SCRIPT, "--network-interface": "eth0"},
        **{"--gloo-timeout-seconds": "60", "--elastic-timeout": "604800"},
        "--blacklist-cooldown-range": "60",
    }
    assert command == "python /examples/elastic/train.py -np 9"
    assert said == ["--host-discovery-script /etc/mpi/discover_hosts.sh is overruled by " + SCRIPT]
    assert made[-4:] == ["python", "/examples/elastic/train.py", "-np", "9"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-np 2 --network-interface net1 python t.py", {"--network-interface": "net1"}),
        ("-np 2 --network-interfaces=net1 python t.py", {"--network-interfaces": "net1"}),
        ("-np 2 --gloo-timeout 9 python t.py", {"--gloo-timeout-seconds": "9"}),
        ("--num-proc=2 python t.py", {"--num-proc": "2"}),
        ("python t.py", {"--min-np": "1", "-np": "1"}),
        ("--min-np 2 --max-np 3 python t.py", {"--min-np": "2", "-np": "2"}),
        ("--verbose -np 1 --slots-per-host 1 -- python t.py", {"--verbose": None}),
    ],
)
def test_what_users_give_stays(line: str, expected: dict[str, str | None]) -> None:
    options, _ = told(line)
    assert expected.items() <= options.items()


def test_the_fewest_processes_are_those_of_the_fewest_nodes() -> None:
    options, _ = told("python t.py", JobSize(2, 4, 8))
    assert options["--min-np"] == "16"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-H a:1,b:1 python t.py", "-H cannot hold: the launcher's sidecar tells"),
        ("--hostfile /etc/mpi/hostfile python t.py", "--hostfile cannot hold"),
        ("-p22 python t.py", "-p cannot hold: no ssh is used"),
        ("--mpi -np 2 python t.py", "--mpi cannot hold: an elastic job needs Gloo"),
        ("--reset-limit 3 python t.py", "--reset-limit cannot hold"),
        ("-np 4 python t.py", "-np 4 cannot hold: the job has at most 3 nodes with 1 slots"),
        ("--min-np 9 python t.py", "--min-np 9 cannot hold"),
        ("--slots-per-host 2 -np 2 python t.py", "--slots-per-host 2 cannot hold"),
        ("-np two python t.py", "-np two: give a number from 1"),
    ],
)
def test_what_cannot_hold_is_refused_in_one_sentence(line: str, why: str) -> None:
    with pytest.raises(LineError) as caught:
        arguments(line.split(), SCRIPT, "eth0", SIZE)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_max_np_below_the_jobs_min_is_refused_and_others_that_differ_are_told() -> None:
    with pytest.raises(LineError, match="--max-np 2 cannot hold: the job has at least 4 nodes"):
        arguments(["--max-np", "2", "python", "t.py"], SCRIPT, "eth0", JobSize(4, 8, 1))
    _, said = arguments(["-np", "2", "--max-np", "2", "t.py"], SCRIPT, "eth0", SIZE)
    assert [sentence.partition(",")[0] for sentence in said] == [
        "horovodrun waits below 2 processes",
        "horovodrun uses 2 processes at most",
    ]


def test_the_size_of_the_job_is_what_the_sidecar_has_delivered() -> None:
    assert JobSize.of({"PET_NNODES": "2:8", "MUSTER_SLOTS": "4"}) == (2, 8, 4)
    with pytest.raises(LineError):
        JobSize.of({})


LAUNCHERS = {
    "PATH": "/run/bin:/usr/bin",
    "HOME": "/root",
    "HOSTNAME": "job-launcher",
    "POD_IP": "10.0.0.9",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "NVIDIA_VISIBLE_DEVICES": "",
    "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh",
    "TRACKING_TOKEN": "hunter2",
    "NCCL_DEBUG": "INFO",
    "HOROVOD_CYCLE_TIME": "5",
}


def test_i8_horovodrun_gets_no_secret_and_nothing_of_the_launchers_own_pod() -> None:
    assert environment(LAUNCHERS, "/run", "/run/remote-shell", 100) == {
        "PATH": "/run/remote-shell:/run/bin:/usr/bin",
        "HOME": "/root",
        "NCCL_DEBUG": "INFO",
        "HOROVOD_CYCLE_TIME": "5",
        "MUSTER_RUN_DIR": "/run",
        "PYTHONUNBUFFERED": "1",
    }


def test_an_environment_that_does_not_fit_names_its_largest_variables() -> None:
    large = {**LAUNCHERS, "HOROVOD_A": "x" * 90_000, "NCCL_B": "y" * 50_000}
    with pytest.raises(LineError) as caught:
        environment(large, "/run", "/run/remote-shell", 100)
    assert "HOROVOD_A (90011 bytes), NCCL_B (50008 bytes)" in str(caught.value)


@given(st.dictionaries(st.sampled_from(["HOROVOD_A", "NCCL_B"]), st.text(max_size=70_000)))
def test_what_is_let_through_fits_into_one_argument(variables: dict[str, str]) -> None:
    try:
        kept = environment(variables, "/run", "/run/remote-shell", 1000)
    except LineError:
        return
    line = " ".join(f"{name}={shlex.quote(value)}" for name, value in kept.items())
    assert len(line.encode(errors="surrogatepass")) < LINE_MAX_BYTES - 1000


def test_a_horovodrun_that_is_named_by_its_path_is_found_behind_the_one_that_was_delivered() -> (
    None
):
    environ = {"PATH": "/run/bin:/usr/bin", "A": "b"}
    assert HOROVODRUN.found_first(["/opt/conda/bin/horovodrun", "-np", "2"], environ) == (
        ["horovodrun", "-np", "2"],
        {"PATH": "/run/bin:/opt/conda/bin:/usr/bin", "A": "b"},
    )
    for command in (["horovodrun", "x"], ["sh", "-c", "/opt/horovodrun x"]):
        assert HOROVODRUN.found_first(command, environ) == (command, environ)


def test_the_agent_of_workers_is_known_by_its_name() -> None:
    assert serves_workers(["/var/run/muster/bin/muster-exec", "--", "sshd"])
    assert not serves_workers(["sleep", "muster-exec"])


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
