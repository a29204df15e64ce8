# SPDX-License-Identifier: Apache-2.0
"""The API server of Kubernetes, as far as the controller speaks with it."""
