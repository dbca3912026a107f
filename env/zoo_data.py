"""Data that the corpus is trained on and fed with: made here, or shipped by other packages.

Owns pictures, scenes, sounds, text, sequences, clicks, points and graphs with their answers. Every
function draws from the generator that is passed in; `part` keeps what a model learned on apart from
what its quality is measured on and its inputs are made of.
"""

from __future__ import annotations

import io
import keyword
import sysconfig
import tokenize
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepilot.env.zoo_inputs import image, speech

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Rng = np.random.Generator

#: Token ids of text: ASCII, where 127 stands for anything else.
CHARACTERS = 128

#: Token types of Python and their tags in `tagged_text`; 2 is a keyword, 0 anything else.
_TAGS = {
    tokenize.NAME: 1,
    tokenize.NUMBER: 3,
    tokenize.STRING: 4,
    tokenize.COMMENT: 5,
    tokenize.OP: 6,
}
TAGS = 7

#: Symbols of the sorting task; 0 begins an answer.
SYMBOLS = 32

#: Classes of `textures`, `keywords` and `points`; kinds of object in `scenes` without the ground.
TEXTURES, KEYWORDS, SOLIDS, SHAPES = 8, 10, 6, 3

#: Rows of each table of the click log, and the number of tables.
ROWS, TABLES = 1000, 8


@lru_cache(maxsize=1)
def _digits() -> tuple[Floats, Ints]:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    return found.images.astype(np.float32) / 8 - 1, found.target.astype(np.int64)


def _smooth_zoom(small: Floats, size: int) -> Floats:
    """Bilinear enlargement of a square picture."""
    places = np.linspace(0, len(small) - 1, size)
    low = np.minimum(places.astype(int), len(small) - 2)
    share = (places - low)[:, None]
    rows = small[low] * (1 - share) + small[low + 1] * share
    columns = rows.T
    found: Floats = (columns[low] * (1 - share) + columns[low + 1] * share).T.astype(np.float32)
    return found


def digits(
    rng: Rng, count: int, size: int, part: str = "test", *, moved: bool = True
) -> tuple[Floats, Ints]:
    """Handwritten digits (scikit-learn's) in colour on a textured ground.

    Args:
        rng: Generator.
        count: Pictures.
        size: Their side.
        part: `train` or `test`.
        moved: Whether digits differ in size and place; else they fill the picture.

    Returns:
        Pictures (count, 3, size, size) about zero mean, and the digits.
    """
    pictures, labels = _digits()
    cut = 1400
    rows = rng.integers(0, cut, count) if part == "train" else rng.integers(cut, 1797, count)
    out = 0.3 * image(rng, (count, 3, size, size))
    for place, row in enumerate(rows):
        tall = int(size * rng.uniform(0.7, 0.9)) if moved else size
        ink = (_smooth_zoom(pictures[row], tall) + 1) * 1.2
        y, x = rng.integers(0, size - tall + 1, 2)
        colour = rng.uniform(0.6, 1.2, 3)[:, None, None]
        out[place, :, y : y + tall, x : x + tall] += colour * ink
    return out, labels[rows]


def grey_digits(rng: Rng, count: int, size: int, part: str = "test") -> Floats:
    """Digits alone, (count, 1, size, size), values in -1..1."""
    pictures, _ = _digits()
    rows = rng.integers(0, 1400, count) if part == "train" else rng.integers(1400, 1797, count)
    return np.stack([_smooth_zoom(pictures[row], size) for row in rows])[:, None]


def textures(rng: Rng, count: int, size: int, part: str = "test") -> tuple[Floats, Ints]:
    """Pictures of eight kinds of surface: stripes, checks, dots, rings, waves, weave, grain, cloud.

    Returns:
        Pictures (count, 3, size, size) and kinds; the parts differ by the draws alone.
    """
    del part
    labels = rng.integers(0, TEXTURES, count)
    out = 0.4 * image(rng, (count, 3, size, size))
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) / size
    for place, kind in enumerate(labels):
        angle, rate = rng.uniform(0, np.pi), 2 * np.pi * rng.uniform(4, 9)
        u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
        a, b = rate * u + rng.uniform(0, 6), rate * v + rng.uniform(0, 6)
        centre = rng.uniform(0.2, 0.8, 2)
        surfaces = (
            lambda a=a: np.sign(np.sin(a)),
            lambda a=a, b=b: np.sign(np.sin(a) * np.sin(b)),
            lambda a=a, b=b: 2.0 * (np.sin(a) * np.sin(b) > 0.6) - 0.5,
            lambda c=centre, r=rate: np.sin(r * np.hypot(x - c[0], y - c[1])),
            lambda a=a, b=b: np.sin(a + 1.5 * np.sin(b / 2)),
            lambda a=a, b=b: np.where(np.sin(a / 2) > 0, np.sin(2 * b), np.sin(2 * a)),
            lambda: rng.standard_normal((size, size)),
            lambda: 1.5 * image(rng, (1, size, size))[0],
        )
        contrast = rng.uniform(0.6, 1.2, 3)[:, None, None]
        out[place] += contrast * np.asarray(surfaces[kind]())
    return out.astype(np.float32), labels


def scenes(rng: Rng, count: int, size: int, objects: int = 3) -> tuple[Floats, Ints, Floats, Ints]:
    """Discs, squares and triangles on a textured ground.

    Returns:
        Pictures (count, 3, size, size); masks (count, size, size), 0 the ground, else kind + 1;
        boxes (count, objects, 4) as x0 y0 x1 y1 in 0..1; kinds (count, objects).
    """
    out = 0.5 * image(rng, (count, 3, size, size))
    masks = np.zeros((count, size, size), np.int64)
    boxes = np.zeros((count, objects, 4), np.float32)
    kinds = rng.integers(0, SHAPES, (count, objects))
    y, x = np.mgrid[0:size, 0:size].astype(np.float32)
    # One object a cell of a 2 x 2 grid, so that none hides another.
    half = size / 2
    for place in range(count):
        for number, cell in enumerate(rng.permutation(4)[:objects]):
            radius = rng.uniform(0.1, 0.22) * size
            free = half - 2 * radius
            cx = (cell % 2) * half + radius + rng.uniform(0, free)
            cy = (cell // 2) * half + radius + rng.uniform(0, free)
            dx, dy = np.abs(x - cx), y - cy
            inside = (
                np.hypot(dx, dy) <= radius,
                np.maximum(dx, np.abs(dy)) <= 0.95 * radius,
                (np.abs(dy) <= radius) & (dx <= (dy + radius) / 2),
            )[kinds[place, number]]
            colour = rng.uniform(0.8, 2.0, 3) * rng.choice((-1.0, 1.0))
            out[place][:, inside] = colour[:, None] + 0.1 * rng.standard_normal((3, inside.sum()))
            masks[place][inside] = kinds[place, number] + 1
            boxes[place, number] = (cx - radius, cy - radius, cx + radius, cy + radius)
    return out.astype(np.float32), masks, (boxes / size).astype(np.float32), np.asarray(kinds)


@lru_cache(maxsize=2)
def _text(part: str) -> NDArray[np.uint8]:
    """Source and documentation of Python's standard library; one file in eight is for tests."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [f for i, f in enumerate(files) if (i % 8 == 0) == (part == "test")]
    content = np.frombuffer(b"\n".join(f.read_bytes() for f in chosen), np.uint8)
    return np.where((content == 0) | (content > 126), np.uint8(127), content)


def text(rng: Rng, count: int, length: int, part: str = "test") -> Ints:
    """Pieces of Python's standard library as token ids, (count, length)."""
    content = _text(part)
    starts = rng.integers(0, len(content) - length, count)
    return np.stack([content[s : s + length] for s in starts]).astype(np.int64)


@lru_cache(maxsize=2)
def _tagged(part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Characters of some files of the standard library, and what Python's tokenizer calls them."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [f for i, f in enumerate(files) if (i % 8 == 0) == (part == "test")][:30]
    characters, tags = [], []
    for file in chosen:
        source = file.read_text(encoding="utf-8")
        begins = np.cumsum([0, *(len(line) for line in source.splitlines(keepends=True))])
        tag = np.zeros(len(source), np.uint8)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            start, end = (int(begins[row - 1]) + column for row, column in (token.start, token.end))
            kind = 2 if keyword.iskeyword(token.string) else _TAGS.get(token.type, 0)
            tag[start:end] = kind
        codes = np.frombuffer(source.encode("utf-32-le"), np.uint32)
        characters.append(np.where((codes == 0) | (codes > 126), 127, codes).astype(np.uint8))
        tags.append(tag)
    return np.concatenate(characters), np.concatenate(tags)


def tagged_text(rng: Rng, count: int, length: int, part: str = "test") -> tuple[Ints, Ints]:
    """Pieces of Python and a tag a character: none, name, keyword, number, text, remark, sign."""
    content, tags = _tagged(part)
    starts = rng.integers(0, len(content) - length, count)
    rows = starts[:, None] + np.arange(length)
    return content[rows].astype(np.int64), tags[rows].astype(np.int64)


def unsorted(rng: Rng, count: int, length: int) -> tuple[Ints, Ints, Ints]:
    """Symbols in disorder, the decoder's input (shifted by one), and the symbols in order."""
    source = rng.integers(1, SYMBOLS, (count, length))
    target = np.sort(source, axis=1)
    shifted = np.concatenate([np.zeros((count, 1), np.int64), target[:, :-1]], axis=1)
    return source, shifted, target


@lru_cache(maxsize=1)
def _voices() -> Floats:
    """Speech that other sounds are laid over: 64 clips of one second, always the same."""
    rng = np.random.default_rng(20261201)
    return np.stack([speech(rng, 16000) for _ in range(64)])


def keywords(rng: Rng, count: int, bands: int, frames: int) -> tuple[Floats, Ints]:
    """Two gliding tones over speech, as log spectra: ten words told apart by how the tones glide.

    Returns:
        Features (count, 1, bands, frames) and words.
    """
    labels = rng.integers(0, KEYWORDS, count)
    hop, window = 160, 400
    samples = hop * (frames - 1) + window
    t = np.arange(samples) / 16000
    voices = np.roll(_voices(), int(rng.integers(16000)), axis=1)
    ends = ((300, 900), (900, 300), (500, 500), (400, 1200), (1200, 400))
    out = np.zeros((count, 1, bands, frames), np.float32)
    index = hop * np.arange(frames)[:, None] + np.arange(window)[None]
    for place, word in enumerate(labels):
        low, high = ends[word % 5]
        scale = rng.uniform(0.9, 1.1)
        share = np.linspace(0, 1, samples)
        first = scale * (low + (high - low) * share)
        second = scale * (2600 - 900 * share if word >= 5 else 1700 + 900 * share)
        wave = sum(0.1 * np.sin(2 * np.pi * np.cumsum(f) / 16000) for f in (first, second))
        wave = (
            wave * np.clip(np.sin(np.pi * t / t[-1]), 0, None)
            + 0.5 * voices[rng.integers(len(voices)), :samples]
        )
        power = np.abs(np.fft.rfft(wave[index] * np.hanning(window), axis=1))[:, : 4 * bands] ** 2
        energy = power.reshape(frames, bands, 4).mean(-1)
        out[place, 0] = ((np.log10(energy + 1e-6) + 2) / 2).T
    return out, labels


def clicks(rng: Rng, count: int) -> tuple[Floats, Ints, Floats]:
    """A click log: dense features, rows of tables drawn as clicks are (few are frequent), clicks.

    Whether somebody clicks depends on hidden tastes, which are fixed, and on three dense features.
    """
    fixed = np.random.default_rng(20261201)
    tastes = fixed.standard_normal((TABLES, ROWS, 4)) * 0.7
    dense = rng.standard_normal((count, 8)).astype(np.float32)
    sparse = np.minimum(rng.zipf(1.2, (count, TABLES)), ROWS) - 1
    found = tastes[np.arange(TABLES)[None], sparse]
    score = (found[:, :4] * found[:, 4:]).sum((1, 2)) + dense[:, 0] * dense[:, 1] - dense[:, 2]
    clicked = rng.random(count) < 1 / (1 + np.exp(-1.5 * score))
    return dense, sparse.astype(np.int64), clicked.astype(np.float32)


def points(rng: Rng, count: int, size: int) -> tuple[Floats, Ints]:
    """Points on the surfaces of six solids, turned and stretched, (count, 3, size), and solids."""
    labels = rng.integers(0, SOLIDS, count)
    out = np.zeros((count, 3, size), np.float32)
    for place, solid in enumerate(labels):
        u, v = rng.uniform(0, 2 * np.pi, size), rng.uniform(-1, 1, size)
        ball = rng.standard_normal((3, size))
        ball /= np.linalg.norm(ball, axis=0)
        ring = 1 + 0.35 * np.cos(np.pi * v)
        cloud = (
            lambda ball=ball: ball,
            lambda ball=ball: ball / np.abs(ball).max(axis=0),
            lambda u=u, v=v: np.stack([np.cos(u), np.sin(u), v]),
            lambda u=u, v=v: np.stack([np.cos(u) * (1 - v) / 2, np.sin(u) * (1 - v) / 2, v]),
            lambda u=u, v=v, r=ring: np.stack(
                [r * np.cos(u), r * np.sin(u), 0.35 * np.sin(np.pi * v)]
            ),
            lambda u=u, v=v: np.stack([np.cos(2 * u), np.sin(2 * u), u / np.pi - 1]) * 0.9,
        )[solid]()
        turn, _ = np.linalg.qr(rng.standard_normal((3, 3)))
        cloud = turn @ (cloud * rng.uniform(0.8, 1.2, (3, 1)))
        out[place] = cloud + 0.02 * rng.standard_normal((3, size))
    return out, labels


def graphs(rng: Rng, count: int, nodes: int) -> tuple[Floats, Floats, Floats]:
    """Random graphs in groups, marks on a few nodes, and which nodes two steps lead to from a mark.

    Returns:
        Adjacency (count, nodes, nodes) with rows that sum to 1; features (count, nodes, 16), the
        first of them the mark; answers (count, nodes).
    """
    group = rng.integers(0, 6, (count, nodes))
    near = group[:, :, None] == group[:, None, :]
    draw = rng.random((count, nodes, nodes)) < np.where(near, 0.12, 0.008)
    links = np.triu(draw, 1)
    links = links | links.transpose(0, 2, 1) | np.eye(nodes, dtype=bool)
    marks = rng.random((count, nodes)) < 0.05
    one = (links & marks[:, None, :]).any(-1)
    answers = (links & one[:, None, :]).any(-1)
    features = rng.standard_normal((count, nodes, 16)).astype(np.float32)
    features[:, :, 0] = marks
    adjacency = links / links.sum(-1, keepdims=True)
    return adjacency.astype(np.float32), features, answers.astype(np.float32)


def noisy_digits(rng: Rng, count: int, part: str = "test") -> tuple[Floats, Floats, Floats]:
    """Digits under noise as a diffusion model sees them: pictures, noise levels in 0..1, noise."""
    clean = grey_digits(rng, count, 32, part)
    noise = rng.standard_normal(clean.shape).astype(np.float32)
    level = rng.uniform(0.05, 1.0, count).astype(np.float32)
    angle = (level * np.float32(np.pi / 2))[:, None, None, None]
    return np.cos(angle) * clean + np.sin(angle) * noise, level, noise
