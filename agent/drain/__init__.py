# SPDX-License-Identifier: Apache-2.0
"""The drain of this pod: carries out what ``rdzv.drain`` decides."""
