# SPDX-License-Identifier: Apache-2.0
"""Writes docs/kubernetes-drills.md."""
