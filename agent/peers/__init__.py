# SPDX-License-Identifier: Apache-2.0
"""The idle connections to other sidecars, and what follows when one breaks."""
