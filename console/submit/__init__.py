# SPDX-License-Identifier: Apache-2.0
"""Making a training job in a cluster, following it to its end, and deleting it."""
