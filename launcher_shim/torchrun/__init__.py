# SPDX-License-Identifier: Apache-2.0
"""torchrun as a launcher that Muster drives: standard library only."""
