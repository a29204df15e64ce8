# SPDX-License-Identifier: Apache-2.0
"""Injection of the sidecar into pods as the API server admits them."""
