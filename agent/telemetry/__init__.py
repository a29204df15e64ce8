# SPDX-License-Identifier: Apache-2.0
"""Health, metrics and logs."""
