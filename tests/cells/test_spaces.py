import json

import anndata as ad
import numpy as np
import pytest

from cloister.cells.spaces import check_space, digest_of, space_of
from cloister.errors import DataError


def test_digests_tell_values_shapes_and_order_apart():
    x = np.arange(6.0)
    parts = [(x,), (x.reshape(2, 3),), (x[::-1],), (x + 1e-12,), (x, "a"), ("a", x), (np.array(["a", "b"]),)]
    assert len({digest_of(*p) for p in parts}) == len(parts)
    assert digest_of(x, "a") == digest_of(x.copy(), "a")
    assert digest_of(np.array(["a", "b"], dtype=object)) == digest_of(np.array(["a", "b"]))


def test_a_space_is_read_from_uns_and_compared():
    adata = ad.AnnData(np.zeros((3, 2)), obsm={"X_a": np.zeros((3, 2))})
    assert space_of(adata, "X_a") == space_of(adata, None) == ""
    for notes in ({"space": "aa11"}, json.dumps({"space": "aa11"})):
        adata.uns["X_a"] = notes
        assert space_of(adata, "X_a") == "aa11"
        check_space(adata, "X_a", "aa11")
        check_space(adata, "X_a", "")
        with pytest.raises(DataError, match="another model"):
            check_space(adata, "X_a", "bb22")
    for notes in ("no json", {"space": 3}, [1, 2]):
        adata.uns["X_a"] = notes
        assert space_of(adata, "X_a") == ""
    with pytest.raises(DataError, match="does not say"):
        check_space(adata, "X_a", "bb22")
