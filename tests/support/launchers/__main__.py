# SPDX-License-Identifier: Apache-2.0
"""Writes docs/launchers.md from what is on record."""

from tests.support.launchers.page import PAGE, render

PAGE.write_text(render())
