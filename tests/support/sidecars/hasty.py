# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.support.sidecars.hasty agent``: a sidecar with the terms of quarantine tenfold.

All of its times are a tenth of the product's; the steps that are progress are a setting.
"""

from __future__ import annotations

import agent.surroundings
from console.main import main as command_line
from rdzv.records.quarantine import TERMS, Terms

HASTY = Terms(
    brief_s=TERMS.brief_s / 10,
    first_s=TERMS.first_s / 10,
    longest_s=TERMS.longest_s / 10,
    trial_s=TERMS.trial_s / 10,
)


def main() -> None:
    """Run the command line."""
    vars(agent.surroundings)["TERMS"] = HASTY
    command_line()


if __name__ == "__main__":
    main()
