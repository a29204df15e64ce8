# SPDX-License-Identifier: Apache-2.0
"""Ranks that stand still: how it is noticed, and what their stacks say."""
