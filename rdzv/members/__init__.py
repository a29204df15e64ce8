# SPDX-License-Identifier: Apache-2.0
"""The registration of a member, its lease, and its departure."""
