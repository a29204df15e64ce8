# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of Muster, each beside a baseline measured in the same run."""
