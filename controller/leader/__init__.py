# SPDX-License-Identifier: Apache-2.0
"""Leader election: one replica makes the writes that must be made once."""
