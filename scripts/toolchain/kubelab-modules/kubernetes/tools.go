// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package tools names what scripts/toolchain/kubelab-programs builds, so that go.mod pins it and go.sum verifies it.
package tools

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
	_ "k8s.io/kubernetes/cmd/kubectl"
	_ "k8s.io/kubernetes/cmd/kubelet"
)
