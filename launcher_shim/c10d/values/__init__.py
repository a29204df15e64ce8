# SPDX-License-Identifier: Apache-2.0
"""The values that clients store: cells, and the transactions that write them."""
