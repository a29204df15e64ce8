# SPDX-License-Identifier: Apache-2.0
"""Worlds that change in place: which ranks train together, apart from what torchruns believe."""
