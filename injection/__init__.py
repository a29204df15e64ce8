# SPDX-License-Identifier: Apache-2.0
"""``muster inject``: a pod template in YAML, and the same with the sidecar in it."""
