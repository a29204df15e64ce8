# SPDX-License-Identifier: Apache-2.0
"""The c10d endpoint: torch's TCPStore protocol and its rendezvous, served from the store."""
