# SPDX-License-Identifier: Apache-2.0
"""The parameters of a run: the command line after ``--``, and the settings."""
