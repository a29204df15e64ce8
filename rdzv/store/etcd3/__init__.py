# SPDX-License-Identifier: Apache-2.0
"""The store driver on the etcd3 package."""

import os

# gRPC reads the level of its log as it is imported. Off, unless the user has set it: Muster reports
# errors in its own words. A training that is started from here does not inherit it.
_LEVEL = "GRPC_VERBOSITY"
if _LEVEL not in os.environ:
    os.environ[_LEVEL] = "NONE"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_LEVEL]
