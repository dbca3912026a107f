"""Trains the corpus models that no package ships: fixed seeds, one thread, minutes each.

Owns the tasks: what is drawn, the loss, and the quality on draws that training never saw, beside
what a trivial answer reaches. Definitions are `env/zoo_vision.py` and `env/zoo_sequence.py`, data
is `env/zoo_data.py`. Needs the extra `zoo`. Run as

    python -m routepilot.training.zoo_train NAME [NAME ...]

which writes the weights rounded to float16, and the quality *with those weights*, into the
checkpoints folder. The same machine gives the same bytes; another processor may round otherwise,
which is why the weights are checked in and not made again by `zoo export`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from routepilot.env import zoo_data as data
from routepilot.env.errors import InputError, RoutePilotError
from routepilot.env.zoo_export import DEFINITIONS, TRAINED, load_weights, save_weights
from routepilot.env.zoo_vision import DETECTOR_BOXES, overlaps
from routepilot.training.defaults import checkpoints_folder
from routepilot.training.files import ensure_folder, write_json

Batch = Sequence[Tensor]
Rng = np.random.Generator

#: Seed of weights and draws.
SEED = 20261201

#: Examples a step, and examples that quality is measured on.
BATCH, EXAMPLES = 16, 512


@dataclass(frozen=True)
class Task:
    """What a model learns.

    Attributes:
        what: The task in words.
        draw: Generator, examples and part (`train` or `test`) -> inputs and answers.
        loss: Model and batch -> loss.
        judge: Model and batch -> quality.
        trivial: Batch -> what the best constant answer reaches.
        measure: Name of the quality; smaller is better when it begins with `loss`.
        steps: Steps of training.
        rate: Largest learning rate.
        examples: Examples a step.
    """

    what: str
    draw: Callable[[Rng, int, str], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    judge: Callable[[nn.Module, Batch], float]
    trivial: Callable[[Batch], float]
    measure: str
    steps: int
    rate: float = 2e-3
    examples: int = BATCH


def _tensors(arrays: Sequence[Any]) -> Batch:
    return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]


def _class_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.05)


def _accuracy(model: nn.Module, batch: Batch) -> float:
    return float((model(batch[0]).argmax(1) == batch[1]).float().mean())


def _most_frequent(batch: Batch) -> float:
    return float(torch.bincount(batch[-1].flatten().long()).max() / batch[-1].numel())


def _classes(what: str, draw: Callable[..., Any], steps: int, **rest: Any) -> Task:
    def tensors(rng: Rng, count: int, part: str) -> Batch:
        return _tensors(draw(rng, count, part))

    return Task(what, tensors, _class_loss, _accuracy, _most_frequent, "accuracy", steps, **rest)


def _next_loss(model: nn.Module, batch: Batch) -> Tensor:
    (tokens,) = batch
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def _frequencies(tokens: Tensor) -> float:
    """Cross entropy of the characters' frequencies, nats: the best answer that reads nothing."""
    share = torch.bincount(tokens.flatten(), minlength=data.CHARACTERS) / tokens.numel()
    return float(-(share[share > 0] * share[share > 0].log()).sum())


def _text(steps: int, length: int = 128, rate: float = 2e-3) -> Task:
    return Task(
        "the next character of Python's standard library",
        lambda rng, count, part: _tensors([data.text(rng, count, length + 1, part)]),
        _next_loss,
        lambda model, batch: float(_next_loss(model, batch)),
        lambda batch: _frequencies(batch[0]),
        "loss (nats a character)",
        steps,
        rate,
        8,
    )


def _tag_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _sort_loss(model: nn.Module, batch: Batch) -> Tensor:
    source, shifted, target = batch
    return F.cross_entropy(model(source, shifted).flatten(0, 1), target.flatten())


def _pixel_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([0.4, 1.0, 1.0, 1.0]))


def _mean_overlap(model: nn.Module, batch: Batch) -> float:
    found, truth = model(batch[0]).argmax(1), batch[1]
    shares = []
    for kind in range(1, data.SHAPES + 1):
        both = ((found == kind) & (truth == kind)).sum()
        shares.append(float(both / ((found == kind) | (truth == kind)).sum().clamp(min=1)))
    return float(np.mean(shares))


def _scene_boxes(rng: Rng, count: int, part: str) -> Batch:
    del part
    pictures, _, boxes, kinds = data.scenes(rng, count, 96)
    return _tensors([pictures, boxes, kinds])


def _detector_loss(model: nn.Module, batch: Batch) -> Tensor:
    pictures, boxes, kinds = batch
    scores, offsets = model(pictures)
    anchors: Any = model.anchors
    corners = torch.cat(
        [anchors[:, :2] - anchors[:, 2:] / 2, anchors[:, :2] + anchors[:, 2:] / 2], 1
    )
    share, owner = overlaps(corners[None].expand(len(boxes), -1, -1), boxes).max(2)
    # The best anchor of an object is its own, however small the overlap.
    best = overlaps(corners[None].expand(len(boxes), -1, -1), boxes).argmax(1)
    share = share.scatter(1, best, 1.0)
    owner = owner.scatter(1, best, torch.arange(boxes.shape[1]).expand_as(best))
    positive = share > 0.5
    answer = torch.where(positive, torch.gather(kinds, 1, owner) + 1, 0)
    each = F.cross_entropy(scores.flatten(0, 1), answer.flatten(), reduction="none")
    each = each.reshape(answer.shape)
    count = positive.sum(1)
    # Hard negatives, three a positive.
    rest = torch.where(positive, torch.zeros_like(each), each)
    rank = rest.argsort(1, descending=True).argsort(1)
    kept = positive | (rank < 3 * count[:, None])
    wanted = torch.gather(boxes, 1, owner[..., None].expand(-1, -1, 4))
    middle = (wanted[..., :2] + wanted[..., 2:]) / 2
    size = wanted[..., 2:] - wanted[..., :2]
    aim = torch.cat(
        [(middle - anchors[:, :2]) / (0.1 * anchors[:, 2:]), (size / anchors[:, 2:]).log() / 0.2], 2
    )
    place = F.smooth_l1_loss(offsets[positive], aim[positive])
    return each[kept].mean() + place


def _detection_f1(model: nn.Module, batch: Batch) -> float:
    pictures, boxes, kinds = batch
    found, scores = model(pictures)
    best, kind = scores.max(-1)
    shown = best > 0.5
    match = (overlaps(found, boxes) > 0.5) & (kind[..., None] == kinds[:, None])
    hits = int((match & shown[..., None]).any(1).sum())
    right = int((match.any(2) & shown).sum())
    precision, recall = right / max(int(shown.sum()), 1), hits / kinds.numel()
    assert found.shape[1] == DETECTOR_BOXES
    return 2 * precision * recall / max(precision + recall, 1e-9)


def _noise_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0], batch[1]), batch[2])


def _binary_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0], batch[1]), batch[2])


def _ranked(model: nn.Module, batch: Batch) -> float:
    """Area under the curve: chance that a click scores above a non-click."""
    order = model(batch[0], batch[1]).flatten().argsort().argsort().float() + 1
    yes = batch[2].flatten() > 0.5
    count, others = float(yes.sum()), float((~yes).sum())
    return float((order[yes].sum() - count * (count + 1) / 2) / max(count * others, 1.0))


_PIXELS = Task(
    "the object at each pixel of drawn scenes",
    lambda rng, count, part: _tensors(data.scenes(rng, count, 96)[:2]),
    _pixel_loss,
    _mean_overlap,
    lambda batch: float((batch[1] > 0).float().mean() / data.SHAPES),
    "mean intersection over union",
    220,
    examples=8,
)

#: Name -> task.
TASKS: Mapping[str, Task] = {
    "digits_resnet": _classes(
        "handwritten digits", lambda r, n, p: data.digits(r, n, 64, p), 300, examples=32
    ),
    "digits_mobilenet": _classes(
        "handwritten digits", lambda r, n, p: data.digits(r, n, 64, p), 450, rate=4e-3
    ),
    "digits_vit": _classes(
        "handwritten digits", lambda r, n, p: data.digits(r, n, 64, p, moved=False), 700, rate=1e-3
    ),
    "digits_mixer": _classes(
        "handwritten digits", lambda r, n, p: data.digits(r, n, 64, p, moved=False), 700, rate=1e-3
    ),
    "digits_diffusion": Task(
        "the noise in noisy digits",
        lambda rng, count, part: _tensors(data.noisy_digits(rng, count, part)),
        _noise_loss,
        lambda model, batch: float(_noise_loss(model, batch)),
        lambda batch: float(batch[2].pow(2).mean()),
        "loss (mean square of the noise left)",
        400,
        2e-3,
        12,
    ),
    "textures_convnext": _classes(
        "kinds of surface", lambda r, n, p: data.textures(r, n, 96, p), 280, rate=1e-3
    ),
    "textures_densenet": _classes(
        "kinds of surface", lambda r, n, p: data.textures(r, n, 96, p), 250
    ),
    "textures_regnet": _classes(
        "kinds of surface", lambda r, n, p: data.textures(r, n, 96, p), 250
    ),
    "textures_swin": _classes(
        "kinds of surface", lambda r, n, p: data.textures(r, n, 96, p), 280, rate=1e-3
    ),
    "scenes_unet": _PIXELS,
    "scenes_ssd": Task(
        "the objects of drawn scenes",
        _scene_boxes,
        _detector_loss,
        _detection_f1,
        lambda batch: 0.0,
        "F1 of boxes at overlap 0.5",
        700,
        examples=12,
    ),
    "char_gpt": _text(600),
    "char_bert": Task(
        "what Python's tokenizer calls each character",
        lambda rng, count, part: _tensors(data.tagged_text(rng, count, 128, part)),
        _tag_loss,
        lambda model, batch: float((model(batch[0]).argmax(-1) == batch[1]).float().mean()),
        _most_frequent,
        "accuracy",
        600,
        5e-4,
        8,
    ),
    "char_gru": _text(450),
    "char_retention": _text(450),
    "char_ssm": _text(450),
    "sorter": Task(
        "sequences put in order",
        lambda rng, count, part: _tensors(data.unsorted(rng, count, 48)),
        _sort_loss,
        lambda m, b: float((m(b[0], b[1]).argmax(-1) == b[2]).float().mean()),
        _most_frequent,
        "accuracy",
        1000,
        1e-3,
        examples=32,
    ),
    "keywords_dscnn": _classes(
        "gliding tones over speech", lambda r, n, p: data.keywords(r, n, 40, 98), 350
    ),
    "clicks_dcn": Task(
        "clicks in a made log",
        lambda rng, count, part: _tensors(data.clicks(rng, count)),
        _binary_loss,
        _ranked,
        lambda batch: 0.5,
        "area under the curve",
        6000,
        examples=512,
    ),
    "points_pointnet": _classes(
        "solids from points", lambda r, n, p: data.points(r, n, 512), 700, examples=32
    ),
    "graph_net": Task(
        "nodes within two steps of a mark",
        lambda rng, count, part: _tensors(data.graphs(rng, count, 64)),
        _binary_loss,
        lambda m, b: float(((m(b[0], b[1]) > 0) == (b[2] > 0.5)).float().mean()),
        lambda batch: _most_frequent(batch[2:]),
        "accuracy",
        2500,
        examples=16,
    ),
}


def fit(name: str, steps: int | None = None) -> nn.Module:
    """Train a model from its seed.

    Args:
        name: Key of `TASKS`.
        steps: Steps; the task's own when None.
    """
    task = TASKS[name]
    steps = task.steps if steps is None else steps
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    rng = np.random.default_rng([SEED, *name.encode()])
    model = DEFINITIONS[name]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, task.rate, total_steps=max(steps, 1) + 1, pct_start=0.15
    )
    for _ in range(steps):
        loss = task.loss(model, task.draw(rng, task.examples, "train"))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def quality(name: str, model: nn.Module) -> dict[str, object]:
    """Quality on unseen draws beside what a trivial answer reaches.

    Args:
        name: Key of `TASKS`.
        model: The model.
    """
    task = TASKS[name]
    rng = np.random.default_rng([SEED, 1, *name.encode()])
    batch = task.draw(rng, EXAMPLES, "test")
    with torch.no_grad():
        reached = task.judge(model.eval(), batch)
    return {
        "task": task.what,
        "measure": task.measure,
        "reached": round(reached, 4),
        "trivial": round(task.trivial(batch), 4),
    }


def learned(facts: Mapping[str, Any]) -> bool:
    """Whether a model is better than the trivial answer by a wide margin."""
    reached, trivial = float(facts["reached"]), float(facts["trivial"])
    if str(facts["measure"]).startswith("loss"):
        return reached < 0.75 * trivial
    return reached > trivial + 0.5 * (1 - trivial)


def train_and_save(name: str, folder: Path) -> dict[str, object]:
    """Train, write the weights as float16, and judge what was written.

    Args:
        name: Key of `TASKS`.
        folder: Folder of weights and `quality.json`.
    """
    start = time.perf_counter()
    trained = fit(name)
    seconds = time.perf_counter() - start
    save_weights(trained, folder / f"{name}.safetensors")
    again = DEFINITIONS[name]()
    load_weights(again, folder / f"{name}.safetensors")
    facts = quality(name, again) | {"train_seconds": round(seconds)}
    place = folder / "quality.json"
    known = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
    known[name] = facts
    write_json(place, {n: known[n] for n in TRAINED if n in known})
    return facts


def main(arguments: Sequence[str] | None = None) -> int:
    """Train from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="routepilot.training.zoo_train", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(TRAINED), help="models; all when absent")
    parser.add_argument("--out", type=Path, help="folder; the released weights when absent")
    given = parser.parse_args(arguments)
    try:
        unknown = [name for name in given.names if name not in TASKS]
        if unknown:
            raise InputError(f"{unknown[0]!r} is not trained here; there is: {', '.join(TASKS)}")
        folder = ensure_folder(given.out or checkpoints_folder() / "zoo")
        for name in given.names:
            print(name, json.dumps(train_and_save(name, folder)), flush=True)
    except RoutePilotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
