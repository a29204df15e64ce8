# SPDX-License-Identifier: Apache-2.0
"""The server for TCPStore clients: sockets, connections, sessions."""
