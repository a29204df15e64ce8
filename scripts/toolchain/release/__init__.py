# SPDX-License-Identifier: Apache-2.0
"""What a release publishes, made of one commit: the same bytes whenever it is made again."""
