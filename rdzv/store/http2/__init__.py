# SPDX-License-Identifier: Apache-2.0
"""A client's side of HTTP/2, and of gRPC on it, as far as a store driver needs them."""
