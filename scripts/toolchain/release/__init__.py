# SPDX-License-Identifier: Apache-2.0
"""The artefacts of a release, built from one commit: reproducible, byte for byte."""
