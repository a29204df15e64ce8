# SPDX-License-Identifier: Apache-2.0
"""The state of a job in a word: one table of states, and the decision on it."""
