"""The protocols: one file each, with every role in it, in folders by what they are for.

A protocol is called by its file everywhere: on the wire, in receipts, in `cloister explain`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import types
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def names() -> dict[str, str]:
    """Protocol → the folder that its file is in; helpers and circuits are among them."""
    return {p.stem: p.parent.name for p in sorted(HERE.glob("*/*.py")) if p.stem != "__init__"}


def load(name: str) -> types.ModuleType:
    """The module of a protocol; that of a test or a benchmark lies beside the folders."""
    folder = names().get(name)
    return importlib.import_module(f"cloister.protocols.{f'{folder}.' if folder else ''}{name}")


@functools.cache
def docstring(name: str) -> str:
    """What a protocol file says about itself, read without importing it; empty if there is no such file."""
    if name not in names():
        return ""
    return ast.get_docstring(ast.parse((HERE / names()[name] / f"{name}.py").read_text(encoding="utf-8"))) or ""


def section(name: str, title: str) -> str:
    """One section (`Reveals`, `Assumes`, `Cost`, ...) of a protocol's docstring."""
    return cut_section(docstring(name), title)


def cut_section(text: str, title: str) -> str:
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\S[^\n]*\n-+$|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else ""
