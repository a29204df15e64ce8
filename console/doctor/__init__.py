# SPDX-License-Identifier: Apache-2.0
"""``muster doctor``: examines a store, or what the chart has installed in a cluster."""
