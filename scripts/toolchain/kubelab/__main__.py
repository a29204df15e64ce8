# SPDX-License-Identifier: Apache-2.0
"""Usage: scripts/kubelab COMMAND

A real two-node Kubernetes on this machine, for tests: API server, controller manager, scheduler,
CoreDNS, two containerds and two kubelets. Every command needs root, and a Debian; nothing is pulled
from a registry.

  prepare           download, install and build what up needs of that, and start nothing
  up                make it, or what is missing of it; prints the path of its KUBECONFIG
  down              end it and leave nothing behind but the cache, installed Debian packages and
                    an empty lock file
  status            what runs; ends with 1 if it is not up
  kubectl ARG...    the kubectl that fits
  load ARCHIVE...   load docker archives (docker save, podman save) into both nodes
  lose NODE         what others see when a machine is gone; NODE is node-a or node-b
  stop-kubelet NODE stop the kubelet alone
  restore NODE      start the node's kubelet again
  operator          build kubeflow's training-operator, install its CRDs and roles, and run it
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kubelab import images, lab, needs, node, operator
from kubelab.errors import LabError
from kubelab.layout import KUBECONFIG, PROGRAMS


def main(arguments: list[str]) -> int:
    """Run one command; return the exit status."""
    if arguments not in (["-h"], ["--help"]):
        needs.require_root()  # its state, and the keys to it, are root's
    match arguments:
        case ["prepare"]:
            with lab.locked():
                lab.prepare()
        case ["up"]:
            with lab.locked():
                lab.up()
            print(KUBECONFIG)
        case ["down"]:
            with lab.locked():
                lab.down()
        case ["status"]:
            return _tell()
        case ["kubectl", *rest]:
            program = PROGRAMS / "kubectl"
            if not program.exists():
                raise LabError("the lab is not up: scripts/kubelab up")
            os.execv(program, [str(program), f"--kubeconfig={KUBECONFIG}", *rest])
        case ["load", first, *rest]:
            images.load([Path(first), *map(Path, rest)])
        case ["lose", name]:
            node.lose(lab.layout_of(name))
        case ["stop-kubelet", name]:
            node.stop_kubelet(lab.layout_of(name))
        case ["restore", name]:
            node.start_kubelet(lab.layout_of(name))
        case ["operator"]:
            with lab.locked():
                operator.up()
        case ["-h" | "--help"]:
            print(__doc__)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def _tell() -> int:
    seen = lab.status()
    for name, runs in seen.running.items():
        print(f"{name:<24} {'runs' if runs else 'does not run'}")
    print(f"{'nodes that are ready':<24} {', '.join(seen.ready_nodes) or 'none'}")
    if seen.up:
        print(f"{'KUBECONFIG':<24} {KUBECONFIG}")
    return 0 if seen.up else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LabError as error:
        print(f"kubelab: {error}", file=sys.stderr)
        sys.exit(error.status)
