# SPDX-License-Identifier: Apache-2.0
"""The documentation of this repository as a website: ``scripts/docs``."""
