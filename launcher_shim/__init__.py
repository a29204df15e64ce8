# SPDX-License-Identifier: Apache-2.0
"""What launchers see of the membership."""
