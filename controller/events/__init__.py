# SPDX-License-Identifier: Apache-2.0
"""Publication of the jobs' events as Kubernetes Events."""
