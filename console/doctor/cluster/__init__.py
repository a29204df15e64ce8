# SPDX-License-Identifier: Apache-2.0
"""``muster doctor --cluster``: examines what the chart has installed, and labelled pods."""
