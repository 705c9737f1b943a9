"""What makes `cloister.pp` and `cloister.tl`: modules whose names, scanpy's, are workflows, imported when used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def workflows_as(module: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module with these names; each workflow has its own name there, too."""
    known = {**names, **{workflow: workflow for workflow in names.values()}}

    def get(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module '{module}' has no '{name}'; it has {', '.join(sorted(known))}")
        return getattr(importlib.import_module(f"cloister.workflows.{known[name]}.workflow"), known[name])

    return get, lambda: sorted(known)
