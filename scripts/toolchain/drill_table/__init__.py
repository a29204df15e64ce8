# SPDX-License-Identifier: Apache-2.0
"""Generates docs/kubernetes-drills.md."""
