# SPDX-License-Identifier: Apache-2.0
"""The store in one process, and the server that speaks etcd's API over it."""
