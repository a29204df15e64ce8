# SPDX-License-Identifier: Apache-2.0
"""One pod's part in a world that changes in place: its report, its file, its share of decisions."""
