# SPDX-License-Identifier: Apache-2.0
"""The client of the Kubernetes API server, as far as the controller needs one."""
