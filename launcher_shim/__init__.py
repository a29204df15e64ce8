# SPDX-License-Identifier: Apache-2.0
"""The launchers' view of the membership."""
