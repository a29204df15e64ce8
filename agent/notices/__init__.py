# SPDX-License-Identifier: Apache-2.0
"""How the sidecar learns that its pod will go away: one file for each way."""
