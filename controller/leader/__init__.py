# SPDX-License-Identifier: Apache-2.0
"""Which of the replicas writes what must be written once."""
