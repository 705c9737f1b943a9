"""A provider that computes on a GPU, and owners that do not: nobody notices."""

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("torch")
import emulated
from encoders import micro

from cloister.errors import ParameterError
from cloister.mpc.crypto.owner_ckks import scheme
from cloister.provider.gpu import cuda_device
from cloister.study import Party
from cloister.testing import Case, check_no_errors, run_protocol, values
from cloister.workflows.adapt_model import encrypted_inference as inference

HUB, ANN = Party("hub"), Party("ann")


def case(device):
    encoder = micro()
    s = encoder.shape
    x = np.random.default_rng(1).uniform(-1, 1, (2, s.tokens - 1, s.inputs))
    return Case(inference.Params((ANN,), HUB, s, scheme.SMALL), {HUB: (encoder, None, device), ANN: (x,)})


@pytest.mark.parametrize("kernels", ["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def test_owners_get_their_taps_in_the_same_messages(kernels, monkeypatch):
    """Every fresh ciphertext is kept by halves: c_1 comes from its seed whenever it is read."""
    from cloister.provider.gpu import gpu_store

    emulated.choose(kernels, monkeypatch)
    monkeypatch.setattr(gpu_store, "MANY", 0.0)
    drawn, again = [], gpu_store.CardShelf._drawn_again
    monkeypatch.setattr(gpu_store.CardShelf, "_drawn_again", lambda *a: drawn.append(a[1]) or again(*a))
    found = run_protocol(inference, case("gpu"), timeout=120.0)
    check_no_errors(found)
    assert drawn
    c = case("cpu")
    exact = inference.ideal(c.params, {p: x[0] for p, x in c.inputs.items()})[ANN]
    assert np.abs(values(found)[ANN] - exact).max() < 0.3  # noise of the smallest ring; over 20 runs 0.055 ± 0.024
    plain = run_protocol(inference, c, timeout=120.0)
    check_no_errors(plain)

    def told(run):
        return [(e.name, e.bytes) for e, _ in run.receipts[ANN].entries if e.kind in ("sent", "received")]

    assert told(found) == told(plain)


def test_a_card_that_is_not_there_ends_it_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr(cuda_device, "why_not", lambda: "PyTorch finds no NVIDIA card on this machine")
    run = run_protocol(inference, case("gpu"), timeout=4.0)
    assert isinstance(run.errors[HUB], ParameterError)
    assert "a GPU was requested" in str(run.errors[HUB])
