# SPDX-License-Identifier: Apache-2.0
"""``muster local``: an elastic job on one machine, and its output."""
