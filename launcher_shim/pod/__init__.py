# SPDX-License-Identifier: Apache-2.0
"""Files delivered to the user's containers: standard library and POSIX sh only."""
