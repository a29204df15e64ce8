// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package tools names what scripts/toolchain/kubelab-programs builds, so that go.mod pins it and go.sum verifies it.
package tools

import (
	_ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	_ "sigs.k8s.io/controller-tools/cmd/controller-gen"
)
