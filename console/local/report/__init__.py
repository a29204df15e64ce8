# SPDX-License-Identifier: Apache-2.0
"""What a run shows: its timeline, worlds, picture and outcome."""
