# SPDX-License-Identifier: Apache-2.0
"""The table of launch lines: each line in a real job, and what came of it."""
