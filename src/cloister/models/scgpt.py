"""An scGPT-compatible cell encoder: the network, its checkpoint files, and cells as tokens.

    tokens      <cls> and the expressed genes of a cell that the vocabulary knows, with their values
    x_j         GeneEncoder(gene_j) + ValueEncoder(value_j)                        no positions
    layers      post-norm transformer, ReLU; padding is masked
    embedding   the last layer at <cls>, divided by its length

The official files of a checkpoint are `args.json`, `vocab.json` and `best_model.pt`. They name attention weights in
three ways, by what the model was trained with, and all three are read. A tensor that is missing, of another shape or
unknown is an error: weights left at random still give embeddings that look plausible.

References
----------
[CWM+24] Cui et al., scGPT, Nature Methods 2024; names and shapes as in the package scgpt 0.2.4.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister.errors import DataError, MissingExtra, ParameterError
from cloister.models.cell_bins import bin_cell, cell_rng

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
except ImportError:
    raise MissingExtra("torch", "models") from None

SPECIALS = ("<pad>", "<cls>", "<eoc>")
FILES = ("args.json", "vocab.json", "best_model.pt")
LARGEST_VALUE = 512  # the value encoder clamps here

# Tensors of a checkpoint that belong to its pretraining heads and play no part in the embedding.
HEADS = re.compile(
    r"flag_encoder\.weight"
    r"|decoder\.(fc|zero_logit)\.[024]\.(weight|bias)"
    r"|cls_decoder\.(_decoder\.\d+|out_layer)\.(weight|bias)"
    r"|mvc_decoder\.(gene2query|W|W_zero_logit|fc1|fc2|hidden_activation)\.(weight|bias)"
)


@dataclass(frozen=True)
class Config:
    """Shape of the encoder; the defaults are those of the whole-human model."""

    width: int = 512  # d
    heads: int = 8
    hidden: int = 512  # f, of the feed-forward part
    layers: int = 12
    dropout: float = 0.2
    pad_value: float = -2.0
    n_bins: int = 51
    max_length: int = 1200  # tokens of a cell, <cls> included

    def __post_init__(self) -> None:
        if min(self.width, self.heads, self.hidden, self.layers) < 1 or self.width % self.heads:
            raise ParameterError(f"the width {self.width} must be a multiple of the number of heads {self.heads}")
        if self.n_bins < 3 or self.max_length < 2 or not 0 <= self.dropout < 1:
            raise ParameterError("an encoder needs at least 3 bins, 2 tokens, and a dropout in [0, 1)")


NAMES = {  # in args.json
    "width": "embsize",
    "heads": "nheads",
    "hidden": "d_hid",
    "layers": "nlayers",
    "dropout": "dropout",
    "pad_value": "pad_value",
    "n_bins": "n_bins",
    "max_length": "max_seq_len",
}
OPTIONAL = ("n_bins", "max_length", "dropout", "pad_value")


# ---- the network -----------------------------------------------------------------------------------------------------


class GeneEncoder(nn.Module):
    def __init__(self, tokens: int, d: int, pad: int) -> None:
        super().__init__()
        self.embedding, self.enc_norm = nn.Embedding(tokens, d, padding_idx=pad), nn.LayerNorm(d)

    def forward(self, genes: Tensor) -> Tensor:
        return self.enc_norm(self.embedding(genes))  # (b, n, d)


class ValueEncoder(nn.Module):
    def __init__(self, d: int, dropout: float) -> None:
        super().__init__()
        self.linear1, self.linear2, self.norm = nn.Linear(1, d), nn.Linear(d, d), nn.LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        v = values.float().clamp(max=LARGEST_VALUE).unsqueeze(-1)  # (b, n, 1)
        return self.dropout(self.norm(self.linear2(F.relu(self.linear1(v)))))  # (b, n, d)


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * d, d))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * d))
        self.out_proj = nn.Linear(d, d)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor, keep: Tensor | None, first: int | None) -> Tensor:
        d = x.shape[-1]
        asked = x if first is None else x[:, :first]

        def split(t: Tensor) -> Tensor:  # (b, n, d) → (b, heads, n, d / heads)
            return t.unflatten(-1, (self.heads, d // self.heads)).transpose(1, 2)

        q = split(F.linear(asked, self.in_proj_weight[:d], self.in_proj_bias[:d]))
        k, v = (split(t) for t in F.linear(x, self.in_proj_weight[d:], self.in_proj_bias[d:]).chunk(2, -1))
        dropout = self.dropout if self.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=dropout)
        return self.out_proj(o.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, f = config.width, config.hidden
        self.self_attn = Attention(d, config.heads, config.dropout)
        self.linear1, self.linear2 = nn.Linear(d, f), nn.Linear(f, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.dropout, self.dropout1, self.dropout2 = (nn.Dropout(config.dropout) for _ in range(3))

    def forward(self, x: Tensor, keep: Tensor | None, first: int | None = None) -> Tensor:
        """Only the first positions if `first` says how many: the last layer is asked for <cls> alone."""
        a = self.self_attn(x, keep, first)
        x = self.norm1((x if first is None else x[:, :first]) + self.dropout1(a))
        return self.norm2(x + self.dropout2(self.linear2(self.dropout(F.relu(self.linear1(x))))))


class Stack(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))


class Encoder(nn.Module):
    """Tokens to vectors. Parameter names are those of the official files."""

    def __init__(self, tokens: int, pad: int, config: Config) -> None:
        super().__init__()
        self.pad, self.config = pad, config
        self.encoder = GeneEncoder(tokens, config.width, pad)
        self.value_encoder = ValueEncoder(config.width, config.dropout)
        self.transformer_encoder = Stack(config)
        nn.init.uniform_(self.encoder.embedding.weight, -0.1, 0.1)

    def forward(self, genes: Tensor, values: Tensor) -> Tensor:
        """Return the last layer at <cls>, (b, d), from (b, n) gene ids and (b, n) values."""
        return self.tokens(genes, values, first=1)[:, 0]

    def tokens(self, genes: Tensor, values: Tensor, first: int | None = None) -> Tensor:
        padding = genes.eq(self.pad)
        keep = ~padding[:, None, None, :] if bool(padding.any()) else None
        x = self.encoder(genes) + self.value_encoder(values)
        *body, last = self.transformer_encoder.layers
        for layer in body:
            x = layer(x, keep)
        return last(x, keep, first)  # (b, n or first, d)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@dataclass
class ScGPT:
    """An encoder with its vocabulary; `digest` tells whether two sites hold the same one."""

    encoder: Encoder
    vocab: dict[str, int]
    config: Config
    trained: bool  # False: random weights, which `embed` refuses unless told otherwise

    @property
    def digest(self) -> str:
        h = hashlib.sha256(json.dumps([dataclasses.asdict(self.config), self.vocab], sort_keys=True).encode())
        for name, tensor in sorted(self.encoder.state_dict().items()):
            h.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return h.hexdigest()

    @classmethod
    def load(cls, folder: str | Path) -> ScGPT:
        """Read an official checkpoint: a folder with `args.json`, `vocab.json` and `best_model.pt`."""
        folder = Path(folder)
        for name in FILES:
            if not (folder / name).is_file():
                raise DataError(f"{folder} has no {name}; a checkpoint is a folder with {', '.join(FILES)}")
        config = read_config(_read_json(folder / FILES[0]))
        vocab = read_vocab(_read_json(folder / FILES[1]))
        try:
            state = torch.load(folder / FILES[2], map_location="cpu", weights_only=True)
        except Exception as e:  # torch raises a different kind for every way in which a file can be wrong
            raise DataError(
                f"{folder / FILES[2]} is not a tensor file ({type(e).__name__}); download it again. Files that need "
                "more than tensors are not opened, since they could run code."
            ) from None
        if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
            raise DataError(f"{folder / FILES[2]} must hold a map of names to tensors")
        encoder = Encoder(len(vocab), vocab["<pad>"], config)
        encoder.load_state_dict(match_tensors(state, encoder.state_dict()))
        return cls(encoder.eval(), vocab, config, trained=True)

    @classmethod
    def random(cls, genes: Sequence[str], config: Config, seed: int = 0) -> ScGPT:
        """An encoder that has learned nothing, for tests and for training from scratch."""
        vocab = read_vocab({name: i for i, name in enumerate(genes)})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder = Encoder(len(vocab), vocab["<pad>"], config)
        return cls(encoder.eval(), vocab, config, trained=False)

    def save(self, folder: str | Path) -> None:
        """Write the three files in the official form."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        args: dict[str, Any] = {NAMES[k]: v for k, v in dataclasses.asdict(self.config).items()}
        args |= {"pad_token": "<pad>", "input_emb_style": "continuous"}
        (folder / FILES[0]).write_text(json.dumps(args, indent=1))
        (folder / FILES[1]).write_text(json.dumps(self.vocab))
        torch.save({k: v.detach().cpu() for k, v in self.encoder.state_dict().items()}, folder / FILES[2])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise DataError(f"{path} is not JSON ({type(e).__name__}); download it again") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold names and values, found {type(content).__name__}")
    return content


def read_config(args: Mapping[str, Any]) -> Config:
    """Read `args.json`; what would change the encoder beyond its shape is refused."""
    style = args.get("input_emb_style", "continuous")
    if style != "continuous":
        raise DataError(f"args.json requires input_emb_style '{style}'; only 'continuous' values are supported")
    if args.get("pre_norm"):
        raise DataError("args.json requires pre_norm; only post-norm encoders are supported")
    if args.get("pad_token", "<pad>") != "<pad>":
        raise DataError(f"args.json calls the padding {args['pad_token']!r}; expected '<pad>'")
    values = {}
    for field in dataclasses.fields(Config):
        key = NAMES[field.name]
        if key not in args or args[key] is None:
            if field.name not in OPTIONAL:
                raise DataError(f"args.json lacks '{key}'; is it the file that came with the checkpoint?")
            continue
        if isinstance(args[key], bool) or not isinstance(args[key], int | float):
            raise DataError(f"args.json: '{key}' must be a number, found {args[key]!r}")
        values[field.name] = float(args[key]) if isinstance(field.default, float) else int(args[key])
    fields: dict[str, Any] = values
    return Config(**fields)


def read_vocab(raw: Mapping[str, Any]) -> dict[str, int]:
    """Read `vocab.json`: names to ids 0, 1, ...; special tokens that are missing are appended, as scGPT does."""
    vocab = dict(raw)
    for token in SPECIALS:
        vocab.setdefault(token, len(vocab))
    if sorted(v for v in vocab.values() if type(v) is int) != list(range(len(vocab))):
        raise DataError("vocab.json must give every name an id of its own, from 0 on without gaps")
    return vocab


def match_tensors(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the attention weights of a checkpoint, and refuse it unless every tensor is accounted for."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        plain = re.sub(r"\.self_attn\._impl\.", ".self_attn.", name.removeprefix("module."))
        plain = plain.replace(".self_attn.Wqkv.", ".self_attn.in_proj_")
        if plain in renamed:
            raise DataError(f"the checkpoint holds '{plain}' twice, under two names")
        renamed[plain] = tensor
    missing = sorted(own.keys() - renamed.keys())
    unknown = sorted(name for name in renamed.keys() - own.keys() if not HEADS.fullmatch(name))
    shapes = sorted(k for k in own.keys() & renamed.keys() if own[k].shape != renamed[k].shape)
    for what, names in {"lacks": missing, "has unknown": unknown, "has misshapen": shapes}.items():
        if names:
            raise DataError(
                f"the checkpoint {what} {len(names)} tensor(s), e.g. '{names[0]}'; nothing is left at random: use the "
                "three files of one official checkpoint together"
            )
    return {name: renamed[name].float() for name in own}


# ---- cells as tokens -------------------------------------------------------------------------------------------------


def tokenize(
    rows: Any,
    ids: Any,
    names: Sequence[str],
    model: ScGPT,
    *,
    binned: bool = False,
    cls_value: float | None = None,
    seed: int = 0,
) -> list[tuple[Any, Any]]:
    """Gene ids and values of each cell, <cls> first.

    Parameters
    ----------
    rows
        CSR matrix of the cells, (n_cells, n_genes).
    ids
        Token of each gene, -1 where the vocabulary does not know it.
    binned
        The values are bins already.
    cls_value
        Value that goes with <cls>: the padding value as in scGPT's embedding if None; fine-tuning uses 0.
    """
    config = model.config
    head = config.pad_value if cls_value is None else cls_value
    tokens = []
    for i, name in enumerate(names):
        part = slice(rows.indptr[i], rows.indptr[i + 1])
        genes, values = ids[rows.indices[part]], rows.data[part]
        known = (genes >= 0) & (values != 0)
        genes, values = genes[known], values[known].astype(np.float64)
        rng = cell_rng(name, seed)
        bins = values if binned else bin_cell(values, config.n_bins, rng)  # over all known genes, before the choice
        if len(genes) > config.max_length - 1:
            chosen = rng.permutation(len(genes))[: config.max_length - 1]
            genes, bins = genes[chosen], bins[chosen]
        tokens.append((np.r_[model.vocab["<cls>"], genes].astype(np.int64), np.r_[head, bins].astype(np.float32)))
    return tokens


def pad_batch(tokens: Sequence[tuple[Any, Any]], model: ScGPT) -> tuple[Tensor, Tensor]:
    """Cells of different lengths as two (b, n) tensors."""
    n = max(len(g) for g, _ in tokens)
    genes = np.full((len(tokens), n), model.vocab["<pad>"], np.int64)
    values = np.full((len(tokens), n), model.config.pad_value, np.float32)
    for i, (g, v) in enumerate(tokens):
        genes[i, : len(g)], values[i, : len(v)] = g, v
    return torch.from_numpy(genes), torch.from_numpy(values)


def by_length(tokens: Sequence[tuple[Any, Any]], batch_size: int) -> Iterator[Any]:
    """Positions of cells in batches of similar length, so that little is padded."""
    order = np.argsort([-len(g) for g, _ in tokens], kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def best_device(device: str | None = None) -> torch.device:
    """The GPU if there is one, unless told otherwise."""
    if device is not None:
        try:
            return torch.device(device)
        except RuntimeError:
            raise ParameterError(f"there is no device '{device}'; use 'cpu' or 'cuda'") from None
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def encode(model: ScGPT, tokens: Sequence[tuple[Any, Any]], *, batch_size: int = 64, device: str | None = None) -> Any:
    """Unit vectors at <cls>, (n_cells, d) of float32."""
    where = best_device(device)
    encoder = model.encoder.to(where).eval()
    out = np.zeros((len(tokens), model.config.width), np.float32)
    for batch in by_length(tokens, batch_size):
        genes, values = pad_batch([tokens[i] for i in batch], model)
        x = F.normalize(encoder(genes.to(where), values.to(where)).float(), dim=1)
        out[batch] = x.cpu().numpy()
    if not math.isfinite(float(out.sum())):
        raise DataError("the encoder gave values that are not numbers; is the checkpoint damaged?")
    return out
