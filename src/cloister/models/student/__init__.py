"""Teachers and students: `transformer`, `sources` (with `names` and `files`), `training`, `export`."""

from __future__ import annotations

from cloister.errors import MissingExtra

try:
    import torch  # noqa: F401
except ImportError:
    raise MissingExtra("torch", "models") from None

from cloister.models.student.export import export
from cloister.models.student.files import read_checkpoint
from cloister.models.student.sources import cell_inputs, from_scgpt, from_state_dict, from_vit, image_inputs, patches
from cloister.models.student.training import History, Recipe, distil, keep_within, tune_teacher
from cloister.models.student.transformer import OFFSET, Block, Trace, Transformer

__all__ = [
    "OFFSET",
    "Block",
    "History",
    "Recipe",
    "Trace",
    "Transformer",
    "cell_inputs",
    "distil",
    "export",
    "from_scgpt",
    "from_state_dict",
    "from_vit",
    "image_inputs",
    "keep_within",
    "patches",
    "read_checkpoint",
    "tune_teacher",
]
