# SPDX-License-Identifier: Apache-2.0
"""What horovodrun sees: the host list."""
