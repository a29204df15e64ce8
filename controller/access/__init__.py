# SPDX-License-Identifier: Apache-2.0
"""Access to the store: a user, a role, and a Secret with a client certificate for each job."""
