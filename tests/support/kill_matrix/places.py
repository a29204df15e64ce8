# SPDX-License-Identifier: Apache-2.0
"""Where in the product a bug is planted, and which functions a test has to call to meet it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[3]
PRODUCT = ("agent", "console", "controller", "injection", "launcher_shim", "muster", "rdzv")

Code = tuple[str, int]
"""A function of the product: its file, and the line where it begins."""


def product_modules() -> list[ModuleType]:
    """All modules of the product that this process has imported."""
    known = [(name, module) for name, module in sys.modules.items() if module is not None]
    return [module for name, module in known if name.partition(".")[0] in PRODUCT]


@dataclass(frozen=True)
class Place:
    """A name in a module or in a class of it, and what it meant before the bug."""

    module: ModuleType
    owner: Any
    name: str
    before: Any
    was_there: bool


Names = dict[int, tuple[ModuleType, Any, dict[str, Any]]]


def names() -> Names:
    """Everything that the product names now."""
    found: Names = {}
    for module in product_modules():
        found[id(module)] = module, module, dict(vars(module))
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                found[id(value)] = module, value, dict(vars(value))
    return found


def places(before: Names) -> Iterator[Place]:
    """What means something else since ``before``."""
    for module, owner, known in before.values():
        for name, value in list(vars(owner).items()):
            if name.startswith("__") or isinstance(value, ModuleType):
                continue
            if known.get(name, _NOTHING) is not value:
                inherited = getattr(owner.__base__, name, None) if inspect.isclass(owner) else None
                yield Place(module, owner, name, known.get(name, inherited), name in known)


def put_back(made: Iterable[Place]) -> None:
    """Let these names mean again what they did."""
    for place in made:
        if place.was_there:
            setattr(place.owner, place.name, place.before)
        else:
            delattr(place.owner, place.name)


def spread(made: Iterable[Place]) -> None:
    """Plant a bug of a function also where other modules have imported it by its name."""
    for place in made:
        if inspect.isfunction(place.before) and place.before.__module__ == place.module.__name__:
            for module in product_modules():
                for name in [n for n, value in vars(module).items() if value is place.before]:
                    setattr(module, name, vars(place.owner)[place.name])


_NOTHING = object()


def codes(place: Place) -> tuple[set[Code], set[Code]]:
    """Functions of which a test must call one of each set, to meet the bug.

    An empty set asks for nothing.
    """
    own = {_key(code) for code in _functions(place.before)}
    defined_here = any(path == _path(place.module) for path, _ in own)
    if own and (defined_here or place.owner is not place.module):
        return own, set()
    return own, _users(place)


def _functions(value: Any) -> Iterator[CodeType]:
    """The code behind a function, a method or a property; nothing for other values."""
    if isinstance(value, property):
        yield from _functions(value.fget)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions(value.__func__)
    elif isinstance(value, functools.partial | functools.cached_property):
        yield from _functions(value.func)
    elif not inspect.isclass(value) and callable(value):
        code = getattr(inspect.unwrap(value), "__code__", None)
        if isinstance(code, CodeType) and code.co_filename.startswith(str(ROOT)):
            yield code


def _key(code: CodeType) -> Code:
    return code.co_filename, code.co_firstlineno


def _path(module: ModuleType) -> str:
    return str(module.__file__)


def _users(place: Place) -> set[Code]:
    """Functions of the module that use the name; where none does, all of them."""
    all_codes = list(_codes_in(_path(place.module)))
    users = {_key(code) for code in all_codes if place.name in code.co_names}
    if place.owner is not place.module:
        users |= {
            _key(code)
            for module in product_modules()
            if module.__file__
            for code in _codes_in(_path(module))
            if place.name in code.co_names
        }
    return users or {_key(code) for code in all_codes}


@cache
def _codes_in(path: str) -> tuple[CodeType, ...]:
    """The functions of a file."""

    def walk(code: CodeType) -> Iterator[CodeType]:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield constant
                yield from walk(constant)

    return tuple(walk(compile(Path(path).read_text(encoding="utf-8"), path, "exec")))
