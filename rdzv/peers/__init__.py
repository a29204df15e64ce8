# SPDX-License-Identifier: Apache-2.0
"""Members that watch each other's machines: who watches whom, and who is evicted early."""
