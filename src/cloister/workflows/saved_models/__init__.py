"""Model files of Cloister, whatever trained them: read by one function, used by one verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from cloister import files
from cloister.errors import DataError
from cloister.models.linear import FORMAT, WITH_TYPICALITY
from cloister.workflows.saved_models import integration, shared_map
from cloister.workflows.saved_models.cell_classifier import CellClassifier

if TYPE_CHECKING:
    from cloister.workflows.saved_models.fine_tuned import FineTuned


def load_model(
    path: str | Path, pretrained: str | Path | None = None
) -> CellClassifier | FineTuned | integration.Integration | shared_map.SharedMap:
    """The model in a file that `train-classifier`, `fine-tune`, `integrate` or `shared-map` wrote.

    `pretrained` is the folder of the checkpoint that a fine-tuned scGPT stands on.
    """
    try:
        with files.load_arrays(path) as kept:
            meta = json.loads(kept["meta"].tobytes())
        kind = meta["format"]
    except OSError:
        raise DataError(f"there is no model file at {path}") from None
    except DataError:
        raise
    except Exception as e:  # every way in which a file can be wrong
        raise DataError(f"{path} is not a model file of Cloister ({type(e).__name__})") from None
    if kind in (FORMAT, WITH_TYPICALITY):
        return CellClassifier.load(path)
    if kind == integration.FORMAT:
        return integration.Integration.load(path)
    if kind == shared_map.FORMAT:
        return shared_map.SharedMap.load(path)
    from cloister.workflows.saved_models.fine_tuned import FineTuned

    return FineTuned.load(path, pretrained)
