# SPDX-License-Identifier: Apache-2.0
"""The injection of the sidecar into pod templates in YAML, and its removal."""
