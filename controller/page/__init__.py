# SPDX-License-Identifier: Apache-2.0
"""A page of what the controller knows of the jobs, for who forwards its port."""
