# SPDX-License-Identifier: Apache-2.0
"""The command line ``muster``: one module or package per command."""
