# SPDX-License-Identifier: Apache-2.0
"""The check that the launcher uses its sidecar."""
