"""Small ViTs of timm, torchvision and transformers with random weights: names, shapes, tensors and what they compute.

    pip install timm torchvision "transformers>=5"; python scripts/make_vit_vectors.py    transformers 5, the rest
    pip install "transformers<5";                   python scripts/make_vit_vectors.py    transformers 4

Run where those libraries can be imported; what one of them makes goes to `tests/vectors/vit_*.npz`, and libraries that
are missing are passed over. The tests read the files and need none of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

OUT = Path(__file__).parents[1] / "tests" / "vectors"
SIZES = {"width": 8, "heads": 2, "hidden": 12, "depth": 2, "patch": 4, "side": 8, "labels": 3}
W, H, F, L, P, S, K = SIZES.values()


def timm_models():
    from timm import __version__
    from timm.models.vision_transformer import VisionTransformer

    shared = {"img_size": S, "patch_size": P, "num_classes": K, "embed_dim": W, "depth": L, "num_heads": H}
    shared["mlp_ratio"] = F / W
    yield "timm", __version__, VisionTransformer(**shared)
    yield (
        "timm_scaled",
        __version__,
        VisionTransformer(**shared, in_chans=1, qkv_bias=False, init_values=0.1, no_embed_class=True),
    )
    yield "timm_averaged", __version__, VisionTransformer(**shared, global_pool="avg", class_token=False)
    yield "timm_registers", __version__, VisionTransformer(**shared, reg_tokens=2)
    yield "timm_normed", __version__, VisionTransformer(**shared, qk_norm=True)


def torchvision_models():
    from torchvision import __version__
    from torchvision.models.vision_transformer import VisionTransformer

    yield "torchvision", __version__, VisionTransformer(S, P, L, H, W, F, num_classes=K)


def transformers_models():
    from transformers import ViTConfig, ViTForImageClassification, ViTModel, __version__

    config = ViTConfig(
        hidden_size=W, num_hidden_layers=L, num_attention_heads=H, intermediate_size=F, image_size=S, patch_size=P,
        num_labels=K,
    )  # fmt: skip
    kind = f"transformers{__version__.split('.')[0]}"
    yield kind, __version__, ViTForImageClassification(config)
    yield f"{kind}_body", __version__, ViTModel(config)


@torch.no_grad()
def store(name: str, version: str, model) -> None:
    generator = torch.Generator().manual_seed(7)
    for key, t in model.state_dict().items():  # no zeros and ones: each tensor must come to its place
        centre = 1.0 if ("norm" in key and key.endswith("weight")) or (".ln" in key and key.endswith("weight")) else 0.0
        t.copy_(centre + 0.3 * torch.randn(t.shape, generator=generator))
    channels = next(t.shape[1] for t in model.state_dict().values() if t.ndim == 4)
    images = torch.randn((4, channels, S, S), generator=generator)
    out = model.eval()(images)
    logits = getattr(out, "logits", getattr(out, "last_hidden_state", out))  # of a body: its tokens, normalised
    told = {"library": name.split("_")[0], "version": version, "sizes": SIZES}
    arrays = {f"state:{k}": v.numpy() for k, v in model.state_dict().items()}
    meta = np.frombuffer(json.dumps(told).encode(), np.uint8)
    np.savez_compressed(OUT / f"vit_{name}.npz", meta=meta, images=images.numpy(), out=logits.numpy(), **arrays)
    print(f"vit_{name}.npz: {version}, {len(arrays)} tensors")


def main() -> None:
    torch.manual_seed(0)
    for models in (timm_models, torchvision_models, transformers_models):
        try:
            for name, version, model in models():
                store(name, version, model)
        except ImportError as e:
            print(f"{models.__name__.removesuffix('_models')} is passed over: {e}")


if __name__ == "__main__":
    main()
