# SPDX-License-Identifier: Apache-2.0
"""All jobs of a store, as its records show them."""
