# SPDX-License-Identifier: Apache-2.0
"""The drain protocol, pure: hold, vote, commit, release."""
