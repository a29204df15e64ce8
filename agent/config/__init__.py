# SPDX-License-Identifier: Apache-2.0
"""The settings of the sidecar, and how they are read."""
