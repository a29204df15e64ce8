// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package tools names what scripts/toolchain/etcd and etcdutl build, so that go.mod pins it and go.sum verifies it.
package tools

import (
	_ "go.etcd.io/etcd/etcdctl/v3"
	_ "go.etcd.io/etcd/etcdutl/v3"
	_ "go.etcd.io/etcd/server/v3"
)
