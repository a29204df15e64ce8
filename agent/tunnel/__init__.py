# SPDX-License-Identifier: Apache-2.0
"""The tunnel: what carries a Horovod launcher's commands to the pods of its workers."""
