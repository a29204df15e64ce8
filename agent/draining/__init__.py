# SPDX-License-Identifier: Apache-2.0
"""Carries out what ``rdzv.draining`` and ``rdzv.gate`` decide."""
