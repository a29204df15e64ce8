# SPDX-License-Identifier: Apache-2.0
"""The tunnel, which carries a central launcher's commands to the pods of its workers."""
