# SPDX-License-Identifier: Apache-2.0
"""What each Python that a test starts does first: it looks for garbage less often.

Python imports this by its name, as it finds this folder in ``PYTHONPATH``. Of the 1.9 s of
processor time that it takes to import torch and to end, 0.6 s went into garbage collections that
found nothing, and a daily run does so some 250 times. A sidecar stays as its users have it.
"""

import atexit
import gc
import sys

if "agent" not in sys.orig_argv:
    gc.set_threshold(50_000, 50, 100)
    atexit.register(gc.freeze)
