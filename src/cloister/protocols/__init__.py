"""Index of the protocols: each is one module, with every role in it.

A protocol is called by its module's name, or by the `PROTOCOL` that it declares: on the wire, in receipts, in
`cloister explain`. Modes: h hardened, s semi-honest, p published, plain; `data/modes.toml` says which workflow runs it
in which.

    mpc/sums/                     sums over sites
      secure_sum            [BIK+17] fig. 4                              s p
      checked_sum           [BIK+17], [CW81] affine tags                h s p plain
      same_view             ours; the module is consistency_check        h p plain s
      common_seed           [MA24] algorithm 1, without its server       h s p plain
      count_tests           [IK02] section 3                             h p plain
      pooled_scaling        ours                                         h p plain
      pooled_quantiles      [FedscGPT] algorithm 1, as it is meant       h
    mpc/three_party/              computation by three parties
      replicated            [AFL+16], [MR18], [AHI+22]                   s p
      verified              [BBC+19], [BGIN20], [LN17]                   h s p plain
    mpc/threshold_ckks/           CKKS keys that all sites hold together
      collective_key        [MTBH21] protocol 1                          h p
      collective_relin      [MTBH21] protocol 2                          h p
      collective_rotation   [MTBH21] section 4.3                         h p
      collective_refresh    [MTBH21] protocol 4; [SAV22] note 4          h p
      collective_range      ours; [BDLN16] random combinations           h
      equal_copies          ours; [Bal86] cube slicing                   h
      threshold_decrypt     [MTBH21] section 4.4; [LM21]                 h p
      key_switch            [MTBH21] protocol 3                          h
      collective_audit      ours                                         h p
    workflows/common/             shared by several workflows
      common_space          ours                                         h s p plain
      common_genes          ours                                         h p s
    workflows/shared_pca/
      shared_pca            [SAT+15] genes; sums ours                    h
    workflows/integrate/
      pooled_harmony        [KMF+19]; sums ours                          h
    workflows/quality_control/
      cell_quality          [LT19], [WLK19]; sums ours                   h
    workflows/choose_genes/
      variable_genes        [SBH+19]; sum of ranks ours                  h
    workflows/cluster_cells/
      shared_prototypes     [LBG80] on groups of cells; sums ours        h
      common_clusters       [TWE19], on points drawn from these          h
    workflows/shared_map/
      common_map            [MHM18], on points drawn from prototypes     h
    workflows/find_markers/
      pooled_markers        [Wel47], [SMO21]; sums ours                  h
    workflows/compare_groups/
      pooled_contrasts      [LCSS14], [Smy04], [PSL+22]; sums ours       h
    workflows/model_outcome/
      pooled_outcomes       [Cox72], [DMS02] groups of donors; ours      h
    workflows/find_programs/
      common_programs       [FBA26], [DMS02] groups of donors; ours      h
    workflows/train_classifier/
      common_labels         ours                                         h s
      pooled_discriminant   [FHT09], [RFL+21]; sums ours                 h
      pooled_logistic       [LN89], [FTU23]; sums ours                   s
      noisy_logistic        [MRTZ18], donors for users                   h
    workflows/map_labels/
      mapping_terms         ours                                         h s p plain
      reference_distances   ours                                         h s
      verified_knn          [FedscGPT] algorithms 3-6, their function    h
      private_knn           the same                                     s p
    workflows/propagate_labels/
      point_roster          [SYL24] algorithm 1, line 1                  h s p
      private_graph         [SYL24] algorithm 1, lines 5-7               s
      verified_propagation  ours; [SYL24] algorithm 1, lines 1-7         h
      private_propagation   [SYL24] algorithm 1, its result              s
      shared_scores         [AFL+16]                                     s p
      chosen_settings       ours                                         s p
      class_means           ours                                         s p
    workflows/fine_tune/          and adapt-model
      checked_training      [ACG+16] clipping and noise, in sums         h
    workflows/train_cellcnn/
      cellcnn_terms         ours                                         h p plain
      encrypted_training    [SAV22] note 4, factored                     h
      encrypted_validation  ours; [SAV22] after an epoch                 h
      pooled_counts         [AC17] the best of several                   h p plain
    workflows/predict_cellcnn/
      cellcnn_card          ours                                         h
      oblivious_prediction  [SAV22] oblivious inference                  h
      private_prediction    [SAV22] with an opened model                 h
    workflows/adapt_model/        and serve-model
      model_card            ours                                         h p
      encrypted_inference   [BlindFed] section 3.2, blinded              h p
    workflows/find_outliers/
      counted_forest        [LTZ08], [HKB19]; counts ours                h
    papers/                       published and plain modes, step by step
      averaged_quantiles    [FedscGPT] algorithm 1, lines 2-9            p
      row_sums              [SYL24] section 3.2, SecureRowSums           p
      federated_harmony     [FH], as its code does it                    p
      published_knn         [FedscGPT] algorithms 3-6, step by step      p
      plain_knn             [FedscGPT] algorithm 2                       plain
      label_propagation     [SYL24] algorithm 1, step by step            p
      federated_training    [MMR+17] algorithm 1; [LSZ+20], [KKM+20]     p
      published_training    [SAV22] note 4, algorithm 1                  p
      clear_training        [SAV22] note 4, in plain numbers             plain
      permuted_inference    [BlindFed] section 3.2, equations 3-7        p
      encrypted_loss        [BlindFed] section 3.3                       p
      masked_forest         [MA24] algorithm 3                           p
      private_slots         [MA24] algorithm 1, algorithm 2 L8           p
    papers/hamming/               distances between codes
      secure_hamming        [SYL24] section 3.2, SecureHamming           p
      hamming_mpc           [SYL24] section 3.2; [AFL+16]                p
      hamming_ot            [SYL24] section 3.2; [BCP13]                 s p
      hamming_he            [SYL24] section 3.2, PHE-based               s p
      oblivious_transfer    [CO15], [IKNP03], [KOS15], [ALSZ13]          s p

The other modules hold circuits, parameters and local steps that several of these share.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import types
from pathlib import Path

from cloister.errors import UsageError

ROOT = Path(__file__).parents[1]
PLACES = ("mpc", "workflows", "papers")
DECLARED = re.compile(r'^PROTOCOL = "(\w+)"$', re.MULTILINE)


@functools.cache
def names() -> dict[str, str]:
    """Protocol → its module, dotted, below `cloister`; helpers and circuits are among them."""
    paths = sorted(p for place in PLACES for p in (ROOT / place).rglob("*.py") if p.stem != "__init__")
    found = {p.stem: ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in paths}
    for p in paths:
        if declared := DECLARED.search(p.read_text(encoding="utf-8")):
            found.setdefault(declared[1], found[p.stem])
    return found


_added: dict[str, str] = {}  # of other packages


def add(name: str, module: str) -> None:
    """Make the protocol of another package known: its module, dotted in full."""
    if name in names():
        raise UsageError(f"'{name}' is a protocol of Cloister; give the one of {module} another name")
    _added[name] = module


def load(name: str) -> types.ModuleType:
    """The module of a protocol."""
    return importlib.import_module(_added[name] if name in _added else f"cloister.{names()[name]}")


def docstring(name: str) -> str:
    """What a protocol's module says about itself; empty if there is no such module."""
    return (load(name).__doc__ or "") if name in _added else _docstring(name)


@functools.cache
def _docstring(name: str) -> str:
    """Read without importing the module."""
    if name not in names():
        return ""
    path = ROOT / f"{names()[name].replace('.', '/')}.py"
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def section(name: str, title: str) -> str:
    """One section (`Reveals`, `Assumes`, `Cost`, ...) of a protocol's docstring."""
    return cut_section(docstring(name), title)


def lines(name: str) -> tuple[str, ...]:
    """The labels of a protocol's lines (`L1`, `L2`, ...), as its docstring lists them, each once."""
    head = docstring(name).partition("\nReveals\n")[0]
    return tuple(dict.fromkeys(re.findall(r"^ {4}([A-Z]\d+)\b", head, flags=re.MULTILINE)))


def cut_section(text: str, title: str) -> str:
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\S[^\n]*\n-+$|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else ""
