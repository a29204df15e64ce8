# SPDX-License-Identifier: Apache-2.0
"""The simulated nodes, and their events."""
