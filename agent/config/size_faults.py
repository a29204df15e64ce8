# SPDX-License-Identifier: Apache-2.0
"""Faults between the settings of how many nodes a world may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rdzv.records.template import Sizes
from rdzv.sentences import named


def size_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence for each fault; a setting that is missing or None was not given."""
    sizes, unit = values.get("sizes") or (), values.get("unit") or 1
    if sizes and unit > 1:
        yield (
            f"{named('--sizes')} and {named('--unit')} are both given: give --sizes alone, which"
            " names every size that is allowed"
        )
        return
    match values:
        case {"min_nodes": int(least), "max_nodes": int(most)}:
            pass
        case _:
            return
    if least > most:
        yield (
            f"{named('--min')} is {least}, more than {named('--max')}, which is {most}: raise max"
            " or lower min"
        )
    elif fault := Sizes(least, most, sizes, unit).fault:
        yield f"{named('--sizes' if sizes else '--unit')}: {fault}"
