# SPDX-License-Identifier: Apache-2.0
"""The rounds of a torch rendezvous: records, decision, views."""
