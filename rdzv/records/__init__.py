# SPDX-License-Identifier: Apache-2.0
"""The records of the store that belong to no other package."""
