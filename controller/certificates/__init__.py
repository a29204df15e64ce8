# SPDX-License-Identifier: Apache-2.0
"""The certificates by which the API server knows the webhook: made, renewed and made known."""
