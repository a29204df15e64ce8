# SPDX-License-Identifier: Apache-2.0
"""Watches that the launcher uses its sidecar."""
