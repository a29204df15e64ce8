# SPDX-License-Identifier: Apache-2.0
"""torch's own side of a rendezvous: its agents, and its pickled state."""
