# SPDX-License-Identifier: Apache-2.0
"""Membership: the store, the records in it and the rules about them.

The package knows no launcher, no Kubernetes, no HTTP.
"""
