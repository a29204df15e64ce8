# SPDX-License-Identifier: Apache-2.0
"""The sidecar's image, and an engine to build and run it, for tests and benchmarks."""
