"""The model that a provider serves, from a ViT's checkpoint and auxiliary images (`cloister distil`).

teacher   the checkpoint, exact; where images have labels, tuned to them within the intervals of its student
student   polynomials for its functions, distilled in two stages; again under a stronger penalty while it leaves
its intervals on any image
served    folded and calibrated, or refused with the place where it left them
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.models import polynomial

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData

    from cloister.models.student import Transformer

LEAST = 8  # images
AT_ONCE = 64
MOST_CALIBRATED = 400  # images for units and projections; one of 224 x 224 takes some 50 MB


@dataclass(frozen=True)
class Settings:
    label_key: str | None = None  # column of obs; none: distilled without labels
    attention: str = "quadratic"
    degree: int = 6  # of Taylor's exp
    epochs: int = 15  # of each stage, as in the paper
    tune_epochs: int = 5
    again: int = 3  # times under a stronger penalty
    batch_size: int = 16
    rate: float = 1e-4
    last_rate: float = 1e-5
    decay: float = 0.1
    penalty: float = 1.0
    rank: int = 8
    validation: float = 0.1
    heads: int | None = None
    eps: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.attention not in polynomial.ATTENTION:
            raise ParameterError(f"attention is one of {', '.join(polynomial.ATTENTION)}, found '{self.attention}'")
        if self.degree not in polynomial.DEGREES:
            raise ParameterError(f"degree is one of {', '.join(map(str, polynomial.DEGREES))}, found {self.degree}")
        if not 0 < self.validation < 1:
            raise ParameterError(f"validation must be between 0 and 1, found {self.validation:g}")
        if min(self.epochs, self.batch_size, self.rank) < 1 or min(self.tune_epochs, self.again) < 0:
            raise ParameterError("epochs, batch-size and rank are at least 1, tune-epochs and again at least 0")
        if min(self.rate, self.last_rate, self.decay) <= 0 or self.decay > 1 or self.penalty < 0:
            raise ParameterError("rates are above 0, decay is above 0 and at most 1, and a penalty is not negative")
        if self.device not in ("cpu", "gpu"):
            raise ParameterError(f"device is cpu or gpu, found '{self.device}'")


@dataclass
class Distilled:
    """What came of it; without `encoder`, the student was refused."""

    encoder: polynomial.Encoder | None
    refusal: str
    rows: list[polynomial.Row]  # spans on all images, beside their intervals
    curves: dict[str, list[float]]  # by stage and part of its loss
    accuracy: dict[str, float]  # on images kept for it, by model; nothing without labels
    agreement: dict[str, float]  # of the same labels as the teacher
    facts: dict[str, Any] = field(default_factory=dict)


def distil_images(
    adata: AnnData, checkpoint: str | Path, settings: Settings, say: Callable[[str], None] = lambda text: None
) -> Distilled:
    """Make a provider's model of images (rows of X) from a checkpoint; raises before training if they do not fit."""
    import torch

    from cloister.models import student

    rows = cells.embedding(adata, None)
    if len(rows) < LEAST:
        raise DataError(f"{len(rows)} image(s) are too few to distil on; at least {LEAST} are needed")
    if settings.device == "gpu" and not torch.cuda.is_available():
        raise ParameterError("device = 'gpu' needs an NVIDIA card that PyTorch sees; there is none")
    device = torch.device("cuda" if settings.device == "gpu" else "cpu")
    torch.manual_seed(settings.seed)
    found = student.read_checkpoint(checkpoint)
    given = {k: getattr(found, k) if getattr(settings, k) is None else getattr(settings, k)
             for k in ("heads", "eps", "mean", "std")}  # fmt: skip
    whole = student.from_state_dict(found.state, labels=_outputs(found.state), degree=settings.degree, **given)
    codes, names, own = labels_of(adata, settings.label_key, found.classes, whole.head.out_features)
    teacher = whole if own else student.from_state_dict(
        found.state, labels=len(names), degree=settings.degree, **given)  # fmt: skip
    teacher = teacher.attend_by(settings.attention).to(device).eval()
    x = torch.as_tensor(student.image_inputs(rows, teacher.card), dtype=torch.float32, device=device)
    y = None if codes is None else torch.as_tensor(codes, device=device)
    say(f"teacher: {_size(teacher)}, {'its own head' if own else f'a new head for {len(names)} labels'}")
    bench = Bench(settings, x, y, say)
    return bench.run(teacher, {"images": len(rows), "labels": list(names) if codes is not None else None,
                               "head": "its own" if own else "new"})  # fmt: skip


def _outputs(state: Any) -> int | None:
    """A head for a body without one, until the labels are known."""
    from cloister.models.student.names import read_state

    return None if read_state(state).labels else 2


def labels_of(
    adata: AnnData, key: str | None, classes: tuple[str, ...], outputs: int
) -> tuple[Any, tuple[str, ...], bool]:
    """Codes of the images' labels, the names of all outputs, and whether the checkpoint's own head is kept.

    It is kept without labels, and where they are its classes: by name, or numbers from 0 as many as it has outputs.
    """
    if key is None:
        return None, classes, True
    if key not in adata.obs:
        raise DataError(f"adata.obs has no column '{key}'; name another, or none to distil without labels")
    column = adata.obs[key]
    if column.isna().any():
        raise DataError(f"{int(column.isna().sum())} image(s) have no label in obs['{key}']; leave them out")
    texts = [str(v) for v in column]
    names = tuple(sorted(set(texts)))
    if len(names) < 2:
        raise DataError(f"all images have the label '{names[0]}' in obs['{key}']; at least two labels are needed")
    numbered = set(names) == set(map(str, range(outputs)))
    own = numbered or (len(classes) == outputs and set(names) <= set(classes))
    order = tuple(map(str, range(outputs))) if numbered else classes if own else names
    at = {name: i for i, name in enumerate(order)}
    return np.array([at[t] for t in texts], np.int64), order, own


def _size(model: Transformer) -> str:
    blocks: list[Any] = list(model.blocks)
    width, tokens = model.embed.out_features, len(model.positions)
    weights = sum(p.numel() for p in model.parameters())
    return f"{tokens} tokens x {width}, {len(blocks)} blocks of {blocks[0].heads} heads, {weights:,} weights"


class Bench:
    """One distillation: images, what is kept of them for judging, and what was measured."""

    def __init__(self, settings: Settings, x: Any, y: Any, say: Callable[[str], None]) -> None:
        self.settings, self.x, self.y, self.say = settings, x, y, say
        order = np.random.default_rng(settings.seed).permutation(len(x))
        kept = max(1, round(settings.validation * len(x)))
        self.kept, self.used = np.split(order, [kept])
        self.some = self.used[:MOST_CALIBRATED]
        if y is not None and len(set(y.tolist())) != len(set(y[self.used].tolist())):
            raise DataError("a label has too few images: all of them are kept for judging; bring more, or keep fewer")
        self.accuracy: dict[str, float] = {}
        self.agreement: dict[str, float] = {}
        self.wanted: Any = None  # the teacher's labels of the kept images

    def run(self, teacher: Transformer, facts: dict[str, Any]) -> Distilled:
        from cloister.models import student

        s, curves = self.settings, {}
        inputs, labels = self.x[self.used], None if self.y is None else self.y[self.used]
        recipe = student.Recipe(s.epochs, s.batch_size, s.rate, s.last_rate, s.decay, penalty=s.penalty, seed=s.seed)
        self.judge("teacher, as it came", self.answers(teacher))
        if labels is not None and s.tune_epochs:
            tuning = dataclasses.replace(recipe, epochs=s.tune_epochs)
            curves["teacher"] = student.tune_teacher(teacher, inputs, labels, tuning)
            self.judge("teacher, tuned within the intervals", self.answers(teacher))
        raw = copy.deepcopy(teacher)
        raw.exact = False
        self.judge("student, before distillation", self.answers(raw))
        made, history = student.distil(teacher, inputs, labels, recipe)
        curves |= history
        self.judge("student, distilled", self.answers(made))
        encoder, rows, refusal = self.checked(made)
        for turn in range(s.again if refusal else 0):
            self.say(
                f"outside its intervals, so once more under a stronger penalty ({turn + 1} of {s.again}): {refusal}"
            )
            more = student.keep_within(teacher, made, inputs, labels, recipe)
            curves = {k: v + more.get(k, []) for k, v in curves.items()}
            encoder, rows, refusal = self.checked(made)
            if not refusal:
                break
        if encoder is not None and not refusal:
            encoder = polynomial.fit_projections(encoder, self.numbers(self.some))
            self.judge("model that is served", self.served(encoder, made))
        facts |= {"kept for judging": len(self.kept), "teacher": _size(teacher), "card": teacher.card}
        return Distilled(
            None if refusal else encoder, refusal, rows, curves, self.accuracy, self.agreement, facts
        )  # fmt: skip

    def numbers(self, at: Any) -> Any:
        return self.x[at].double().cpu().numpy()

    def checked(self, made: Transformer) -> tuple[polynomial.Encoder | None, list[polynomial.Row], str]:
        """Calibrated on images of the training, and looked at on all that there are."""
        from cloister.models.student.export import calibrated

        rows: list[polynomial.Row] = []
        try:
            encoder, ranges = calibrated(made, self.numbers(self.some), rank=self.settings.rank), polynomial.Ranges()
            for start in range(0, len(self.x), AT_ONCE):
                polynomial.measure(encoder, self.numbers(slice(start, start + AT_ONCE)), AT_ONCE, ranges)
            rows = ranges.rows(encoder.shape)
            polynomial.check_rows(rows)
        except ParameterError as e:
            return None, rows, str(e)
        return encoder, rows, ""

    def answers(self, model: Transformer) -> Any:
        import torch

        with torch.no_grad():
            parts = [model(part).argmax(1) for part in self.x[self.kept].split(AT_ONCE)]
        return torch.cat(parts).cpu().numpy()

    def served(self, encoder: polynomial.Encoder, made: Transformer) -> Any:
        """Labels by the sums and products that a provider evaluates, under the student's last norm and head."""
        import torch

        with torch.no_grad():
            tokens = [
                polynomial.hidden(encoder, self.numbers(part))[-1][:, 0]
                for part in np.split(self.kept, range(AT_ONCE, len(self.kept), AT_ONCE))
            ]
            last = torch.as_tensor(np.concatenate(tokens), dtype=torch.float32, device=self.x.device)
            return made.head(made.final(last)).argmax(1).cpu().numpy()

    def judge(self, name: str, found: Any) -> None:
        told = []
        if self.y is not None:
            self.accuracy[name] = float((found == self.y[self.kept].cpu().numpy()).mean())
            told.append(f"{self.accuracy[name]:.1%} right")
        if name.startswith("teacher"):
            self.wanted = found
        else:
            self.agreement[name] = float((found == self.wanted).mean())
            told.append(f"{self.agreement[name]:.1%} as the teacher")
        if told:
            self.say(f"{name}: {', '.join(told)}, of {len(self.kept)} images")
