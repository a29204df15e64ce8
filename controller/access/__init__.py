# SPDX-License-Identifier: Apache-2.0
"""Access to the store: for each job a user, a role, and a Secret with a client certificate."""
