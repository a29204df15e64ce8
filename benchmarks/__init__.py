# SPDX-License-Identifier: Apache-2.0
"""Figures of Muster, each beside a baseline of the same run."""
