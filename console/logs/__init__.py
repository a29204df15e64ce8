# SPDX-License-Identifier: Apache-2.0
"""``muster logs``: the lines of a job's containers, by rank, world after world."""
