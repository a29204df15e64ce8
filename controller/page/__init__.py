# SPDX-License-Identifier: Apache-2.0
"""A page of the controller's view of all jobs, for users who forward its port."""
