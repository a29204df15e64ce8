# SPDX-License-Identifier: Apache-2.0
"""Where in the data training is, and how a world of any size goes on from there."""
