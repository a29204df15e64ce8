# SPDX-License-Identifier: Apache-2.0
"""Commands that look at one job, or change it."""
