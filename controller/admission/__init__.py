# SPDX-License-Identifier: Apache-2.0
"""The sidecar put into pods as the API server admits them."""
