# SPDX-License-Identifier: Apache-2.0
"""The endpoints of one cluster, of the kind that the driver makes its calls with."""

from __future__ import annotations

from collections.abc import Sequence

from rdzv.store.access import Access
from rdzv.store.etcd.certificates import CertificateFiles
from rdzv.store.etcd.endpoint import EtcdEndpoint


def endpoints_of(access: Access) -> Sequence[EtcdEndpoint]:
    """Return an endpoint for each address of ``access``."""
    files = CertificateFiles(access) if access.tls else None
    # Only here: grpc costs memory and threads that the driver without it should not pay.
    if access.driver == "http2":
        from rdzv.store.etcd.http2_endpoint import Http2Endpoint

        return [Http2Endpoint(target, files) for target in access.targets]
    from rdzv.store.etcd.grpc_endpoint import GrpcEndpoint

    return [GrpcEndpoint(target, files) for target in access.targets]
