# SPDX-License-Identifier: Apache-2.0
"""The run directory: what the sidecar and the training container exchange."""
