# SPDX-License-Identifier: Apache-2.0
"""Workers that need not import torch: forks of a process that has, under an unmodified torchrun."""
