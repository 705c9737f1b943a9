"""The protocols: one file each, with every role in it, in folders by what they are for.

A protocol is called by its file everywhere: on the wire, in receipts, in `cloister explain`. `load` finds the file.
"""

from __future__ import annotations

import importlib
import types

FOLDERS = ("sums", "sharing", "knn", "hamming", "propagation", "ckks", "cellcnn", "inference", "forest", "fedavg")


def load(name: str) -> types.ModuleType:
    """The protocol file of that name, whichever folder it is in."""
    for place in (*(f"{folder}." for folder in FOLDERS), ""):
        module = f"cloister.protocols.{place}{name}"
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as e:
            if e.name != module:
                raise
    raise ModuleNotFoundError(f"there is no protocol '{name}'")
