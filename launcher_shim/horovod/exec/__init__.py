# SPDX-License-Identifier: Apache-2.0
"""The start of horovodrun's workers in their pods, instead of ssh: standard library only."""
