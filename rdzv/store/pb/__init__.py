# SPDX-License-Identifier: Apache-2.0
"""Generated from ``rdzv/store/proto`` by ``scripts/generate-stubs``; do not edit by hand."""
