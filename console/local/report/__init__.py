# SPDX-License-Identifier: Apache-2.0
"""The output of a run: its timeline, worlds, picture and outcome."""
