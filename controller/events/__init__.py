# SPDX-License-Identifier: Apache-2.0
"""What happens to jobs, told as Events of Kubernetes."""
