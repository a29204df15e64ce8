# SPDX-License-Identifier: Apache-2.0
"""Commands about a job in a cluster: through the API server alone, by the user's own rights."""
