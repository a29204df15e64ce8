# SPDX-License-Identifier: Apache-2.0
"""What each Python that a test starts does first: it looks for garbage less often.

Python imports this by its name, as it finds this folder in ``PYTHONPATH``. Much of the processor
time of ``import torch`` goes into garbage collections that find nothing, and a daily run imports it
some 250 times. A sidecar stays as its users have it.
"""

import gc
import sys

if "agent" not in sys.orig_argv:
    gc.set_threshold(50_000, 50, 100)
