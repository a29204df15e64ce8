# SPDX-License-Identifier: Apache-2.0
"""What nodes and pods show of an end to come: told to jobs before the kubelet does."""
