"""Options of `fine-tune`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cloister.errors import ParameterError
from cloister.models import graph
from cloister.workflows.options import PAPER, option

IMAGES = ("cnn", "resnet", "vit")


@dataclass(frozen=True)
class Options:
    label_key: str = option("cell_type", "column of obs with the labels, NaN where missing")
    model: Literal["mlp", "scgpt", "cnn", "resnet", "vit"] = option("mlp", "network to train")
    use_rep: str | None = option(
        "X_shared_pca", "key of obsm with the inputs of an MLP, one space of all sites as from shared-pca; X if none"
    )
    labels: tuple[str, ...] = option((), "complete list of label names; if empty, the sites' names are collected")
    rounds: int = option(20, "number of rounds")
    clients_per_round: int = option(0, "number of sites that train per round; 0 for all", modes=PAPER)
    local_epochs: int = option(
        0, "passes over a site's cells per round; in hardened mode each is one opened step; 0 for 1 there, else 5"
    )
    batch_size: int = option(64, "cells per step; hardened mode always takes all cells")
    lr: float = option(0.0, "learning rate; 0 for 0.03 in hardened and 0.003 in published mode")
    schedule: Literal["constant", "cosine"] = option("constant", "learning-rate schedule over the rounds")
    schedule_rounds: int = option(0, "length of a cosine schedule in rounds; 0 for the trained rounds", retired=True)
    optimizer: Literal["adam", "sgd"] = option("adam", "optimiser of a site, started anew in every round", modes=PAPER)
    momentum: float = option(0.9, "momentum of sgd", modes=PAPER)
    weight_decay: float = option(0.0, "weight decay of the optimiser")
    algorithm: Literal["fedavg", "fedprox", "scaffold"] = option(
        "fedavg",
        "local training: fedavg; fedprox pulls it towards the shared model; scaffold corrects its drift",
        modes=PAPER,
    )
    mu: float = option(0.01, "strength of the fedprox term", modes=PAPER)
    weighting: Literal["cells", "plain"] = option(
        "cells", "weight of a site: its training cells, or equal", modes=PAPER
    )
    hidden: tuple[int, ...] = option((128,), "hidden layer widths of an MLP")
    dropout: float = option(0.1, "dropout rate of MLP, CNN, ResNet and ViT")
    width: int = option(64, "width of CNN, ResNet and ViT")
    unit_embedding: bool = option(
        default=False, help="normalise the input of the last layer to length one; not for scgpt"
    )
    image_shape: tuple[int, ...] = option((), "height, width and channels of images stored in the rows of X")
    rotation: float = option(0.0, "largest random rotation of training images, in degrees")
    init: str | None = option(None, "file of initial weights at every site: model.npz, or tensors in .npz or .pt")
    pretrained: str | None = option(None, "folder of an scGPT checkpoint at every site")
    tune: Literal["all", "last", "head", "lora"] = option(
        "all", "trained part of the network; last and lora for scgpt only"
    )
    last_layers: int = option(2, "number of trained layers, with tune=last")
    lora_rank: int = option(8, "rank of the adapters, with tune=lora")
    gene_key: str | None = option(None, "column of var with gene symbols, for scgpt")
    layer: str | None = option(None, "layer with the values, for scgpt; X by default")
    binning: Literal["cell", "none"] = option(
        "cell", "binning for scgpt: by each cell's own quantiles, or none for values that are bins"
    )
    validation: float = option(0.1, "fraction of each label's cells held out for validation")
    score_every: int = option(1, "rounds between validations over all sites; 0 for never")
    metric: Literal["accuracy", "balanced_accuracy", "macro_f1", "loss"] = option(
        "accuracy", "validation score that chooses the best round"
    )
    patience: int = option(0, "validations without improvement before training stops; 0 for never")
    update_bound: float = option(4.0, "largest absolute entry of an update", modes=PAPER, retired=True)
    donor_key: str | None = option(None, "column of obs with donor names; noise then protects donors instead of cells")
    dp_noise: float | None = option(
        None, "noise multiplier of differential privacy; by default 5 in hardened and 0 in published mode"
    )
    dp_clip: float = option(1.0, "largest norm of a cell's gradient; in published mode, of an update")
    dp_delta: float = option(1e-5, "delta of differential privacy")
    dp_unit: Literal["auto", "cell", "donor", "site"] = option(
        "auto",
        "unit that the noise protects; auto takes donors with donor_key, else cells, and whole sites in published mode",
    )
    min_cells: int = option(10, "minimum number of a site's own cells behind its part of an opened sum")
    min_donors: int = option(3, "minimum number of a site's own donors behind it; needs donor_key")
    semi_supervised: bool = option(default=False, help="train on unlabelled cells, too, with pseudo-labels")
    pseudo_labels: Literal["xclp", "client", "network"] = option(
        "xclp", "source of pseudo-labels: label propagation across sites, within each site, or the model itself"
    )
    warm_rounds: int = option(0, "number of rounds on labels alone, before the first pseudo-labels")
    bits: int = option(4096, "length of a cell's binary code for xclp, in bits")
    n_neighbors: int = option(10, "number of neighbours per cell in the graph of label propagation")
    alpha: float = option(0.99, "weight of a step along that graph, between 0 and 1")
    similarity_power: float = option(
        1.0, "exponent of the similarities in that graph; a larger one favours near cells", modes=PAPER, retired=True
    )
    balance: bool = option(
        default=False, help="give the labels of every class the same total weight in that graph", modes=PAPER
    )
    scale_confidence: bool = option(
        default=False, help="scale pseudo-label weights so that a site's surest one equals a given label"
    )
    class_weights: bool = option(default=False, help="weigh a site's pseudo-labels so that all classes count equally")
    hamming: Literal["mpc", "ot", "he"] = option("mpc", "engine for distances between codes, for xclp", modes=PAPER)
    checkpoint: str | None = option(None, "file for the coordinator's state, to resume from", modes=PAPER)
    key_added: str = option("predicted", "column of obs for the model's labels")
    features_added: str | None = option(None, "key of obsm for the input of the last layer; not written by default")

    def __post_init__(self) -> None:
        check_options(self)


def check_options(options: Options) -> None:
    """Raise where options of `fine-tune` are wrong, or do not go together."""
    if not 0 <= options.validation < 1:
        raise ParameterError(f"option 'validation' must be in [0, 1), found {options.validation}")
    if options.labels and (len(set(options.labels)) != len(options.labels) or len(options.labels) < 2):
        raise ParameterError("option 'labels' needs at least two names, each once")
    _check_model(options)
    if options.schedule_rounds and (options.schedule != "cosine" or options.schedule_rounds < options.rounds):
        raise ParameterError("option 'schedule_rounds' needs schedule='cosine', and no fewer rounds than are trained")
    if options.dp_noise is not None and options.dp_noise < 0:
        raise ParameterError(f"option 'dp_noise' must be at least 0, found {options.dp_noise:g}")
    if options.local_epochs < 0 or options.lr < 0:
        raise ParameterError("options 'local_epochs' and 'lr' must be above 0, or 0 for the default of the mode")
    if not 0 < options.dp_delta < 1:
        raise ParameterError(f"option 'dp_delta' must lie between 0 and 1, found {options.dp_delta}")
    if options.algorithm == "scaffold":
        if options.optimizer != "sgd" or options.momentum or options.weighting != "plain":
            raise ParameterError("scaffold corrects plain steps: set optimizer='sgd', momentum=0, weighting='plain'")
        if options.checkpoint is not None or options.dp_noise or options.semi_supervised:
            raise ParameterError(
                "scaffold keeps state at the sites and sends two vectors: it goes with neither checkpoint=, "
                "dp_noise nor semi_supervised; use fedavg or fedprox"
            )
    asked = ("balance", "scale_confidence", "class_weights")
    if not options.semi_supervised and (idle := [name for name in asked if getattr(options, name)]):
        raise ParameterError(f"option '{idle[0]}' is about pseudo-labels; set semi_supervised=True, or leave it out")
    if options.semi_supervised and options.pseudo_labels != "network":
        graph.check_sizes(1 << 40, options.bits, options.n_neighbors, options.alpha, options.similarity_power)


def check_in_mode(options: Options, mode: str) -> None:
    """Raise where options do not fit the mode; `options` have the defaults of the mode filled in."""
    if mode == "hardened":
        _check_hardened(options)
        return
    if options.dp_noise and (options.score_every or options.patience or options.weighting != "plain"):
        raise ParameterError(
            "with dp_noise in published mode, set score_every=0, patience=0 and weighting='plain': counts of cells "
            "carry no noise there"
        )
    if options.donor_key is not None or options.dp_unit != "site":
        raise ParameterError("published mode protects whole sites; 'donor_key' and 'dp_unit' are for mode hardened")
    if options.semi_supervised and options.dp_noise and options.pseudo_labels == "xclp":
        raise ParameterError("dp_noise covers updates only; with xclp, labels of other sites would go around it")


def _check_hardened(options: Options) -> None:
    only = {
        "algorithm": (
            options.algorithm == "fedavg",
            "every step is common to all sites",
        ),
        "optimizer": (options.optimizer == "adam", "every party computes the steps of Adam itself"),
        "weighting": (options.weighting == "cells", "every cell, or every donor with donor_key, counts alike"),
        "clients_per_round": (not options.clients_per_round, "all sites train in every step"),
        "checkpoint": (options.checkpoint is None, "no state is evaluated again, so a run cannot be resumed"),
        "dp_unit": (options.dp_unit in ("cell", "donor"), "noise protects cells, or donors with donor_key"),
    }
    for name, (fits, why) in only.items():
        if not fits:
            found = getattr(options, name)
            raise ParameterError(f"option '{name}' = {found!r} is for mode published; in mode hardened {why}")
    if (options.dp_unit == "donor") != (options.donor_key is not None):
        raise ParameterError("noise protects donors if donor_key names them, and cells otherwise; leave dp_unit out")
    if options.model in ("cnn", "resnet") and options.tune != "head":
        raise ParameterError(
            f"model '{options.model}' has batch normalisation, which mixes cells, so that gradients of single cells "
            "cannot be clipped; in mode hardened use mlp, vit or scgpt, or tune='head' with init="
        )
    if options.dp_noise and (options.patience or options.metric != "accuracy"):
        raise ParameterError("with dp_noise the last round is taken; leave out 'patience' and 'metric'")
    depends = options.pseudo_labels != "network" or options.scale_confidence or options.class_weights
    if options.semi_supervised and options.dp_noise and depends:
        raise ParameterError(
            "dp_noise does not cover pseudo-labels that depend on other cells; set pseudo_labels='network' without "
            "scale_confidence and class_weights, or dp_noise=0, to which every site must consent"
        )


def _check_model(options: Options) -> None:
    shape = options.image_shape
    if options.model in IMAGES and (len(shape) != 3 or min(shape) < 1):
        raise ParameterError(f"model '{options.model}' needs image_shape= as height, width, channels")
    if options.model == "cnn" and min(shape[:2]) < 16:
        raise ParameterError("the 13-layer CNN needs images of at least 16 x 16")
    if options.model in ("resnet", "vit") and shape[0] != shape[1]:
        raise ParameterError(f"model '{options.model}' needs square images")
    if not 0 <= options.rotation <= 180 or (options.rotation and options.model not in IMAGES):
        raise ParameterError(f"option 'rotation' is for images, from 0 to 180 degrees, found {options.rotation:g}")
    if options.model == "scgpt":
        if options.pretrained is None or options.init is not None:
            raise ParameterError("model 'scgpt' needs pretrained= with the folder of a checkpoint, and takes no init=")
        if options.unit_embedding:
            raise ParameterError("option 'unit_embedding' is for the other models than scgpt")
    elif options.tune not in ("all", "head") or (options.tune == "head" and options.init is None):
        raise ParameterError(
            f"model '{options.model}' trains all, or with init= the head alone, found tune='{options.tune}'"
        )
