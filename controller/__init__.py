# SPDX-License-Identifier: Apache-2.0
"""``muster controller``: what Muster does with rights in a cluster: sidecars have none."""
