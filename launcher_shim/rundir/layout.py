# SPDX-License-Identifier: Apache-2.0
"""The names of everything in the run directory, each in this place alone.

``import muster`` has no part of Muster beside it: it repeats the four names that it reads or
writes, and a test compares them. ``discover_hosts.sh`` repeats ``HOSTS``.
"""

from __future__ import annotations

C10D_SOCKET = "c10d.sock"
"""The sidecar's rendezvous, for the relay of ``muster-run``."""
NOTICE_SOCKET = "notice.sock"
"""Where the sidecar takes notices that the pod has to go."""
SHARDS_SOCKET = "shards.sock"
"""Where ranks ask for shards of their data set."""
EXEC_SOCKET = "exec.sock"
"""Where the pod takes the worker commands of a Horovod launcher."""
TUNNEL_SOCKET = "tunnel.sock"
"""In a launcher's pod: where the sidecar takes commands for other pods."""

ENVIRONMENT = "env"
"""Variables for the training command, one ``NAME=VALUE`` a line."""
HOSTS = "hosts"
"""The host list of horovodrun."""
DISCOVER_HOSTS = "discover_hosts.sh"
"""Prints the host list."""
PROGRAMS = "bin"
"""Directory of the programs for the training container."""
TORCHRUN = "torchrun"
"""The one of them that comes before the image's own torchrun."""
HOROVODRUN = "horovodrun"
"""Likewise."""
MUSTER_RUN = "muster-run"
MUSTER_EXEC = "muster-exec"
"""The one that runs the worker commands of a Horovod launcher."""
KUBEXEC = "kubexec.sh"
"""In the run directory itself: what horovodrun starts in the place of ssh."""
REMOTE_SHELL = "remote-shell"
"""Directory with an ``ssh`` that starts horovodrun's workers through the sidecar; in no PATH but
horovodrun's."""
MODULES = "python"
"""Directory of the modules for the training container."""

GATE = "gate.json"
"""What the ranks may do at their next boundary."""
PROGRESS = "progress"
"""Directory with one file for each rank."""
LAUNCH = "launch"
"""Directory for what ``muster-run`` reports."""
LAUNCHER = "launcher.json"
"""In ``LAUNCH``: the launcher that runs below ``muster-run``."""
WORKERS = "workers"
"""Directory with one file for each worker command of a Horovod launcher that runs."""

LOCK = "lock"
"""Held by the sidecar; names its member and process."""
STATE = "state.json"
"""The sidecar's identity and registration, for the sidecar that comes after it."""
STAGES = "stages.json"
"""Which stages of the container's command have ended."""
DRAIN = "drain.json"
"""This pod's own drain."""
COMMIT = "commit.json"
"""The newest epoch that this pod may have voted in."""
