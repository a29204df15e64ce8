# SPDX-License-Identifier: Apache-2.0
"""Prometheus' text format, version 0.0.4: a family of samples.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def family(
    name: str, kind: str, help_text: str, samples: Iterable[tuple[str, Mapping[str, str], float]]
) -> str:
    """Render a family: ``kind`` is counter, gauge or histogram.

    A sample is its name, its labels and its value.
    """
    help_text = help_text.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
    lines += [f"{sample}{_labels(labels)} {number(value)}" for sample, labels, value in samples]
    return "\n".join([*lines, ""])


def number(value: float) -> str:
    """Spell a value as Prometheus reads it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{','.join(pairs)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
