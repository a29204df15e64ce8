# SPDX-License-Identifier: Apache-2.0
"""The run directory, as sidecar and training container both know it: standard library only."""
