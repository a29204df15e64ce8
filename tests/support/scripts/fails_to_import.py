# SPDX-License-Identifier: Apache-2.0
"""A training script that no node can start: it imports what is not installed."""

from __future__ import annotations

import numpyy  # type: ignore[import-not-found]  # noqa: F401
