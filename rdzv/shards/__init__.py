# SPDX-License-Identifier: Apache-2.0
"""Dynamic shards: who trains which ranges of a data set, and what the saved weights contain."""
