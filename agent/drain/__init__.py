# SPDX-License-Identifier: Apache-2.0
"""Drains this pod: carries out what ``rdzv.drain`` decides."""
