# SPDX-License-Identifier: Apache-2.0
"""horovodrun's view of the membership: the host list."""
