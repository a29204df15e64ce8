# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: how to start, find and end them."""
