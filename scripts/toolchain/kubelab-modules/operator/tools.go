// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package tools names what scripts/toolchain/kubelab-programs builds, so that go.mod pins it and go.sum verifies it.
package tools

import (
	_ "github.com/kubeflow/training-operator/cmd/training-operator.v1"
)
