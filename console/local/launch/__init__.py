# SPDX-License-Identifier: Apache-2.0
"""What a run is asked to do: the command line after ``--``, and the settings."""
