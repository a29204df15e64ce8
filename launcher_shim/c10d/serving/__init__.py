# SPDX-License-Identifier: Apache-2.0
"""Serves TCPStore clients: sockets, connections, sessions."""
