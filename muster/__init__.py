# SPDX-License-Identifier: Apache-2.0
"""What a training script imports.

Standard library only, no cost and no effect where no sidecar runs beside the script.
"""

from muster.progress import report_step

__all__ = ["report_step"]
