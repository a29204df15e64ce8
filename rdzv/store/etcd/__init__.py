# SPDX-License-Identifier: Apache-2.0
"""The store driver of Muster's own, ``http2``, and what all drivers share."""
