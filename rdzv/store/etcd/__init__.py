# SPDX-License-Identifier: Apache-2.0
"""The default store driver: etcd over ``grpc.aio``."""
