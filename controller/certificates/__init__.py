# SPDX-License-Identifier: Apache-2.0
"""The webhook's certificates: issued, renewed, and published to the API server."""
