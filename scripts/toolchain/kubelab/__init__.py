# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes of two nodes on one machine, for tests.

Standard library only, Python >= 3.11: it runs before anything is set up.
"""
