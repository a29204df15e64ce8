# SPDX-License-Identifier: Apache-2.0
"""``muster controller``: the part of Muster that has rights in a cluster; sidecars have none."""
