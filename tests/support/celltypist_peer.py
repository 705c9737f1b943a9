"""CellTypist's own training, in an environment of its own: reads cells, writes coefficients and predictions."""

import json
import sys
import warnings

import anndata as ad
import celltypist
import numpy as np


def main(train, asked, c, out):
    cells = ad.read_h5ad(train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"solver": "lbfgs", "max_iter": 5000, "tol": 1e-8, "n_jobs": 1}
        model = celltypist.train(cells, labels="cell_type", C=float(c), check_expression=False, **options)
        called = celltypist.annotate(ad.read_h5ad(asked), model=model).predicted_labels["predicted_labels"]
    classifier, scaler = model.classifier, model.scaler
    found = {
        "labels": [str(name) for name in classifier.classes_],
        "genes": [str(name) for name in classifier.features],
        "coefficients": np.asarray(classifier.coef_).tolist(),
        "mean": np.asarray(scaler.mean_).tolist(),
        "scale": np.asarray(scaler.scale_).tolist(),
        "called": [str(name) for name in called],
        "version": celltypist.__version__,
    }
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
