# SPDX-License-Identifier: Apache-2.0
"""The TCPStore protocol of torch, shared with the training container: standard library only."""
