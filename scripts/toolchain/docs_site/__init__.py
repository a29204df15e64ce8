# SPDX-License-Identifier: Apache-2.0
"""The pages of this repository as a site: ``scripts/docs``."""
