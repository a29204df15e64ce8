# SPDX-License-Identifier: Apache-2.0
"""The store driver on the etcd3 package."""
