# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: how they start, are found, and end."""
