"""Old module names, which keep working for one release and warn.

`import cloister` installs the finder. A name of 1.0 is imported as the module that has taken its place.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

MODULES = {  # of their own
    "cells.pace": "cells.progress",
    "cells.tally": "mpc.sums.value_counts",
    "check_disclosure": "rehearsal.check_disclosure",
    "crypto.ckks.chain": "mpc.crypto.ckks.parameters",
    "crypto.fixedpoint": "mpc.crypto.fixed_point",
    "crypto.lattice": "mpc.crypto.rns",
    "crypto.sharing": "mpc.crypto.shamir",
    "lies": "mpc.testing.lies",
    "net.seat": "session",
    "net.steps": "mpc.net.multiplex",
    "protocols.sums.attempts": "mpc.sums.retry_without_dropouts",
    "protocols.sums.common_genes": "workflows.common.common_genes",
    "protocols.sums.common_space": "workflows.common.common_space",
    "protocols.sums.same_view": "mpc.sums.consistency_check",
    "protocols.sums.shared_pca": "workflows.shared_pca.shared_pca",
    "protocols.sums.signed": "mpc.sums.signatures",
    "protocols.sums.tally": "mpc.sums.pooled_queries",
    "report.signed": "report.provenance",
    "run.together": "rehearsal.compatibility",
    "run.wires": "mpc.net.memory_transport",
    "runtime.attend": "deploy.join",
    "runtime.order": "deploy.control_socket",
    "runtime.sign_off": "deploy.approval",
    "workflows.baselines": "papers.baselines",
    "workflows.steps": "workflows.pipeline",
    "workflows.trained": "workflows.saved_models",
}
PACKAGES = {  # with whatever has kept its name in them
    "attacks": "papers.attacks",
    "crypto": "mpc.crypto",
    "net": "mpc.net",
    "protocols.ckks": "mpc.threshold_ckks",
    "protocols.forest": "workflows.find_outliers",
    "protocols.groups": "workflows.compare_groups",
    "protocols.hamming": "papers.hamming",
    "protocols.harmony": "workflows.integrate",
    "protocols.inference": "workflows.adapt_model",
    "protocols.knn": "workflows.map_labels",
    "protocols.logistic": "workflows.train_classifier",
    "protocols.propagation": "workflows.propagate_labels",
    "protocols.cellcnn": "workflows.train_cellcnn",
    "protocols.fedavg": "workflows.fine_tune",
    "protocols.sharing": "mpc.three_party",
    "protocols.sums": "mpc.sums",
    "run": "rehearsal",
    "runtime": "deploy",
}


def new_name(name: str) -> str | None:
    """The module that an old name stands for; None if it is not one of ours."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        old, rest = ".".join(parts[1:length]), parts[length:]
        if new := MODULES.get(old) or PACKAGES.get(old):
            return ".".join(["cloister", new, *rest])
    return None


class Renamed(Loader):
    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has put that of the old name there

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m`, which units of systemd call by the old names."""
        loader: Any = self.spec.loader if self.spec is not None else None
        return loader.get_code(self.module.__name__)  # type: ignore[no-any-return]

    def is_package(self, name: str) -> bool:
        return hasattr(self.module, "__path__")


class OldNames(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("cloister.") or (new := new_name(name)) is None:
            return None
        try:
            module = importlib.import_module(new)
        except ModuleNotFoundError as e:
            if e.name == new:
                return None
            raise
        warnings.warn(f"{name} is now {new}; the old name goes in the next release", DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, Renamed(module), is_package=hasattr(module, "__path__"))


def install() -> None:
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())  # before a renamed package's own path is searched under the old name
