# SPDX-License-Identifier: Apache-2.0
"""Carries out what ``rdzv.drain.decision`` and ``rdzv.drain.gate`` decide."""
