# SPDX-License-Identifier: Apache-2.0
"""Early notices: signs on nodes and pods that a pod will end, before the kubelet says so."""
