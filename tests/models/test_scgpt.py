import json

import numpy as np
import pytest
from scipy import sparse

torch = pytest.importorskip("torch")

from cloister.errors import DataError, ParameterError  # noqa: E402
from cloister.models import scgpt  # noqa: E402
from cloister.models.cell_bins import bin_cell  # noqa: E402
from cloister.models.scgpt import Config, ScGPT  # noqa: E402

SMALL = Config(width=32, heads=4, hidden=48, layers=3, dropout=0.1, n_bins=11, max_length=20)
GENES = [f"GENE{i}" for i in range(40)]


@pytest.fixture
def model():
    return ScGPT.random(GENES, SMALL, seed=1)


def batch(model, lengths=(7, 12, 3), seed=0):
    rng = np.random.default_rng(seed)
    tokens = []
    for n in lengths:
        genes = np.r_[model.vocab["<cls>"], rng.choice(len(GENES), n, replace=False)]
        tokens.append((genes, np.r_[-2.0, rng.integers(1, 11, n)].astype(np.float32)))
    return tokens


class Official(torch.nn.Module):
    """What the official class is without flash-attn: torch's own transformer under the official names."""

    def __init__(self, tokens, pad, c):
        super().__init__()
        nn = torch.nn
        self.pad = pad
        self.encoder = nn.Module()
        self.encoder.embedding = nn.Embedding(tokens, c.width, padding_idx=pad)
        self.encoder.enc_norm = nn.LayerNorm(c.width)
        self.value_encoder = nn.Module()
        self.value_encoder.linear1 = nn.Linear(1, c.width)
        self.value_encoder.linear2 = nn.Linear(c.width, c.width)
        self.value_encoder.norm = nn.LayerNorm(c.width)
        layer = nn.TransformerEncoderLayer(c.width, c.heads, c.hidden, c.dropout, batch_first=True)
        self.transformer_encoder = nn.TransformerEncoder(layer, c.layers, enable_nested_tensor=False)

    def forward(self, genes, values):
        v = values.unsqueeze(-1).clamp(max=512)
        e = self.value_encoder
        x = self.encoder.enc_norm(self.encoder.embedding(genes))
        x = x + e.norm(e.linear2(torch.relu(e.linear1(v))))
        return self.transformer_encoder(x, src_key_padding_mask=genes.eq(self.pad))


def official_state(model, seed=5):
    torch.manual_seed(seed)
    official = Official(len(model.vocab), model.vocab["<pad>"], SMALL).eval()
    for name, p in official.named_parameters():  # norms and biases start at constants: move them
        if p.dim() == 1:
            torch.nn.init.normal_(p, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    heads = {
        "flag_encoder.weight": torch.zeros(2, 32),
        "decoder.fc.0.weight": torch.zeros(32, 32),
        "cls_decoder._decoder.2.bias": torch.zeros(32),
        "mvc_decoder.W.weight": torch.zeros(32, 32),
    }
    return official, {**official.state_dict(), **heads}


def renamed(state, style):
    if style == "in_proj":
        return state
    to = {"flash": "self_attn.Wqkv.", "flash2": "self_attn._impl.Wqkv.", "impl": "self_attn._impl.in_proj_"}[style]
    out = {}
    for k, v in state.items():
        k = k.replace("self_attn.in_proj_", to)
        out[k.replace("self_attn.out_proj", "self_attn._impl.out_proj") if style in ("flash2", "impl") else k] = v
    return out


def write(folder, model, state):
    model.save(folder)
    torch.save(state, folder / "best_model.pt")
    return folder


@pytest.mark.parametrize("style", ["in_proj", "flash", "flash2", "impl"])
def test_equals_the_official_network_under_every_naming(model, style, tmp_path):
    official, state = official_state(model)
    loaded = ScGPT.load(write(tmp_path, model, renamed(state, style)))
    assert loaded.trained
    genes, values = scgpt.pad_batch(batch(model), model)
    with torch.no_grad():
        wanted, found = official(genes, values), loaded.encoder.tokens(genes, values)
    keep = genes != model.vocab["<pad>"]
    assert (wanted - found)[keep].abs().max() < 1e-5  # float32, another order of additions
    cls = torch.nn.functional.normalize(wanted[:, 0], dim=1).numpy()
    np.testing.assert_allclose(scgpt.encode(loaded, batch(model), device="cpu"), cls, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("transformer_encoder.layers.1.self_attn.in_proj_bias"), "lacks 1"),
        (lambda s: s.update({"bn.weight": torch.zeros(32)}), "unknown 1 tensor.*bn.weight"),
        (lambda s: s.update({"dsbn.bns.0.weight": torch.zeros(32)}), "unknown"),
        (lambda s: s.update({"encoder.embedding.weight": torch.zeros(7, 32)}), "misshapen"),
        (lambda s: s.update({"transformer_encoder.layers.0.self_attn.Wqkv.weight": torch.zeros(96, 32)}), "twice"),
        (lambda s: s.update({"step": 3}), "map of names to tensors"),
    ],
)
def test_every_tensor_is_accounted_for(model, change, message, tmp_path):
    _, state = official_state(model)
    change(state)
    with pytest.raises(DataError, match=message):
        ScGPT.load(write(tmp_path, model, state))


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_a_file_that_would_run_code_is_not_opened(model, tmp_path, capsys):
    write(tmp_path, model, {"encoder.embedding.weight": Evil()})
    with pytest.raises(DataError, match="could run code"):
        ScGPT.load(tmp_path)
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("args.json", "{", "not JSON"),
        ("args.json", "[]", "must hold names"),
        ("args.json", json.dumps({"embsize": 32}), "lacks 'nheads'"),
        ("args.json", json.dumps({"input_emb_style": "category"}), "category"),
        ("vocab.json", json.dumps({"A": 0, "B": 5}), "without gaps"),
        ("best_model.pt", "not tensors", "is not a tensor file"),
    ],
)
def test_damaged_files(model, file, content, message, tmp_path):
    model.save(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=message):
        ScGPT.load(tmp_path)


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match="args.json"):
        ScGPT.load(tmp_path)


def test_save_and_load_are_inverse(model, tmp_path):
    model.save(tmp_path)
    back = ScGPT.load(tmp_path)
    assert (back.digest, back.config) == (model.digest, model.config)
    assert ScGPT.random(GENES, SMALL, seed=2).digest != model.digest


def test_padding_and_order_of_genes_change_nothing(model):
    tokens = batch(model)
    together = scgpt.encode(model, tokens, device="cpu")
    alone = np.vstack([scgpt.encode(model, [t], device="cpu") for t in tokens])
    turned = [(np.r_[g[0], g[:0:-1]], np.r_[v[0], v[:0:-1]]) for g, v in tokens]
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(together, scgpt.encode(model, turned, device="cpu"), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_bins_are_those_of_scgpt():
    values = np.array([1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    edges = np.quantile(values, np.linspace(0, 1, 10))
    np.testing.assert_array_equal(bin_cell(values, 11, None), np.digitize(values, edges))
    ties = np.array([1.0] * 50 + [7.0])
    spread = bin_cell(ties, 51, np.random.default_rng(0))
    assert spread[:-1].min() >= 0
    assert spread[:-1].max() <= 49
    assert len(set(spread[:-1].tolist())) > 10  # the ties lie on all but the last edge
    assert bin_cell(ties[:0], 51, None).size == 0


def test_tokens_depend_on_the_cells_name_and_not_on_its_place(model):
    rng = np.random.default_rng(0)
    x = sparse.csr_matrix(rng.poisson(1.5, (6, 40)).astype(np.float32))
    ids, names = np.arange(40), [f"cell-{i}" for i in range(6)]
    forward = scgpt.tokenize(x, ids, names, model)
    back = scgpt.tokenize(x[::-1].tocsr(), ids, names[::-1], model)
    for (g, v), (h, w) in zip(forward, back[::-1], strict=True):
        np.testing.assert_array_equal(g, h)
        np.testing.assert_array_equal(v, w)
    assert all(len(g) <= SMALL.max_length and g[0] == model.vocab["<cls>"] and v[0] == -2 for g, v in forward)
    other = scgpt.tokenize(x, ids, [f"other-{i}" for i in range(6)], model)
    assert any(len(v) != len(w) or (v != w).any() for (_, v), (_, w) in zip(forward, other, strict=True))


def test_unknown_genes_are_left_out_and_cls_value_is_explicit(model):
    x = sparse.csr_matrix(np.array([[3.0, 0, 5, 2]]))
    ((genes, values),) = scgpt.tokenize(x, np.array([4, 5, -1, 7]), ["a"], model, binned=True, cls_value=0.0)
    assert genes.tolist() == [model.vocab["<cls>"], 4, 7]
    assert values.tolist() == [0.0, 3.0, 2.0]


@pytest.mark.parametrize("bad", [{"width": 30}, {"n_bins": 2}, {"dropout": 1.0}, {"max_length": 1}])
def test_bad_config(bad):
    with pytest.raises(ParameterError):
        Config(**{"width": 32, "heads": 4, **bad})


def test_whole_human_shape():
    model = scgpt.Encoder(60_697, 60_694, Config())
    count = sum(p.numel() for p in model.parameters())
    assert count == 60_697 * 512 + 1024 + (1024 + 512 * 513 + 1024) + 12 * (4 * 512 * 513 + 2 * 512 * 513 + 2048)
