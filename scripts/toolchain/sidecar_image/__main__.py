# SPDX-License-Identifier: Apache-2.0
"""Builds the sidecar's image if it must, and prints where its archive is."""

from __future__ import annotations

import sys

from sidecar_image.image import sidecar_archive

sys.stdout.write(f"{sidecar_archive()}\n")
