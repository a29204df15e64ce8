# SPDX-License-Identifier: Apache-2.0
"""``muster scaleout`` and ``muster scalein``: more or fewer pods, by their owner's own means."""
