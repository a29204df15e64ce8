# SPDX-License-Identifier: Apache-2.0
"""``muster top``: one job on one screen, with keys."""
