# SPDX-License-Identifier: Apache-2.0
"""Starts horovodrun's workers in their pods, instead of ssh: standard library only."""
