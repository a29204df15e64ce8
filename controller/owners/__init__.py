# SPDX-License-Identifier: Apache-2.0
"""The pods of jobs and the objects that created them."""
