#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# kubexec.sh HOST COMMAND: runs a worker's command on a host of the list, instead of ssh. Its exit
# status is the command's; 255 where that is not known.
# Neither the launcher's PYTHONPATH nor its working directory has a say in what is imported.
exec python3 -I -S -c 'import sys
sys.path.insert(0, sys.argv.pop(1))
from launcher_shim.horovod.exec.client import main
sys.exit(main(sys.argv[1:]))' "${0%/*}/python" "$@"
