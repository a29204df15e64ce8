# SPDX-License-Identifier: Apache-2.0
"""``horovodrun``, first in the PATH of a command: the image's own, as a launcher of Muster's.

In a launcher's container it gets Muster's host list, and starts its workers through the sidecar;
anywhere else it is the image's own with the same arguments. Files that an operator mounts read-only
at ``/etc/mpi`` are not changed: Horovod does not use them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import struct
import sys
from typing import Dict, List, Mapping, Sequence, Tuple

from launcher_shim.exit_status import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_USAGE
from launcher_shim.pod.delivery import RunDirectory
from launcher_shim.pod.early_signals import unblock
from launcher_shim.pod.entry_point import started_lightly
from launcher_shim.pod.horovod_line import JobSize, LineError, arguments, environment
from launcher_shim.pod.horovod_pod import is_launcher
from launcher_shim.pod.horovodrun_options import TELLS_ONLY, read_options
from launcher_shim.pod.images_own import images_own
from launcher_shim.pod.log_lines import configure
from launcher_shim.rundir import layout

log = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_USUAL_INTERFACE = "eth0"


def main() -> int:
    """Become the image's horovodrun; return the exit status if that fails."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    unblock()
    configure("muster-run")
    words = sys.argv[1:]
    own = images_own(layout.HOROVODRUN, sys.argv[0], os.environ)
    if own is None:
        log.error("horovodrun: not found in the PATH")
        return EXIT_NOT_FOUND
    environ: Mapping[str, str] = os.environ
    run_dir = RunDirectory.find(environ, sys.argv[0])
    try:
        delivered = run_dir.delivered() or {}
    except ValueError as error:
        log.error("%s", error)
        return EXIT_USAGE
    start = [own]
    if is_launcher(delivered) and not TELLS_ONLY & set(read_options(words).names()):
        try:
            words, environ = _as_launcher(words, environ, run_dir, delivered)
        except LineError as error:
            log.error("%s", error)
            return EXIT_USAGE
        start = started_lightly(own)
    try:
        os.execve(start[0], [*start, *words], environ)
    except OSError as error:
        log.error("%s: %s", start[0], error.strerror)
        return EXIT_NOT_EXECUTABLE


def _as_launcher(
    words: Sequence[str],
    environ: Mapping[str, str],
    run_dir: RunDirectory,
    delivered: Mapping[str, str],
) -> Tuple[List[str], Dict[str, str]]:
    remote = os.path.join(run_dir.path, layout.REMOTE_SHELL)
    discovery = os.path.join(run_dir.path, layout.DISCOVER_HOSTS)
    interface = interface_of(delivered.get("PET_LOCAL_ADDR", ""))
    made, said = arguments(words, discovery, interface, JobSize.of(delivered))
    for sentence in said:
        log.info("%s", sentence)
    command_bytes = sum(len(os.fsencode(word)) + 3 for word in read_options(words).command)
    # The PATH is the image's own: the programs beside this one are only for muster-run.
    return made, environment(environ, run_dir.path, remote, command_bytes)


def interface_of(address: str) -> str:
    """Return the network interface that has the pod's address; ``eth0`` if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address of this family
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return _USUAL_INTERFACE
