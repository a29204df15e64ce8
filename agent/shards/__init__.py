# SPDX-License-Identifier: Apache-2.0
"""Dynamic shards in the sidecar: brings the requests of this pod's ranks to the store."""
