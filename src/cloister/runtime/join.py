"""A site's way in from Python: the place of its kit in the study, for the functions of the workflows.

    seat = cl.join("kits/basel")
    cl.map_labels(adata, seat)          # waits for the study's next run, takes part with these cells, writes the labels

The run itself happens in the kit's own service and its process, as with `cloister run`: no key and no connection is in
the session that calls this, and `local/site.toml` says what is approved.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.cells.files import read_cells, write_cells
from cloister.errors import UsageError
from cloister.net.receipts import Receipt
from cloister.net.seat import Outcome
from cloister.runtime.attend import attend
from cloister.runtime.kit import Kit
from cloister.study import Party, Study

if TYPE_CHECKING:
    from anndata import AnnData


@dataclass(frozen=True)
class Joined:
    """A site's place in the study of its kit. Every call of a workflow's function with it is one run."""

    kit: Path
    study: Study
    me: Party
    say: Callable[[str], None] = print

    def take_part(self, adata: AnnData) -> tuple[Outcome, Path]:
        """Take part in the study's next run with these cells."""
        with tempfile.TemporaryDirectory(prefix="cloister-") as folder:
            path = Path(folder) / "cells.h5ad"
            write_cells(adata, path, private=True)
            ended = attend(self.kit, path, say=self.say)
        home = Path(ended.folder)
        receipt = Receipt.load(home / f"{self.me}.receipt.json")
        cells = read_cells(home / f"{self.me}.h5ad")
        return Outcome(cells, dict(ended.result), receipt, dict(ended.cost)), home


def join(kit: str | Path, *, say: Callable[[str], None] = print) -> Joined:
    """Open a site's kit, for `cl.map_labels(adata, seat)` and the like.

    Parameters
    ----------
    kit
        The folder that `cloister provision` made for this site, approved with `cloister site KIT --approve`.
    say
        Gets a line when the site begins to wait for a run.
    """
    opened = Kit.open(kit)
    if opened.role != "site":
        raise UsageError(f"{opened.me} is the study's {opened.role} and brings no cells; start it with: cloister site")
    return Joined(opened.path, opened.study, opened.me, say)
