# SPDX-License-Identifier: Apache-2.0
"""How a member registers, holds its lease, and leaves."""
