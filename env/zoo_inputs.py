"""Input sets for the corpus that resemble what the models are made for.

Owns generators of images, drawn text, audio, spectra, bytes and token ids. Everything comes from
the random generator that is passed in; nothing is read from outside this package.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: Samples a second of made audio.
RATE = 16000


@dataclass(frozen=True)
class Input:
    """An input of a corpus model: name, shape, and who makes its values."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.generic]]


def image(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Images with the 1/f spectrum of photographs and a few shapes, about zero mean, unit scale."""
    *lead, height, width = shape
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None]
    fall = 1.0 / np.maximum(np.hypot(fy, fx), 1.0 / max(height, width))
    noise = np.fft.fft2(rng.standard_normal((*lead, height, width))) * fall
    picture = np.real(np.fft.ifft2(noise))
    picture /= picture.std(axis=(-2, -1), keepdims=True)
    for _ in range(4):
        y, x = rng.integers(0, max(height // 2, 1)), rng.integers(0, max(width // 2, 1))
        tall, wide = rng.integers(4, height // 2 + 5), rng.integers(4, width // 2 + 5)
        picture[..., y : y + tall, x : x + wide] += rng.normal(0, 1)
    found: Floats = np.clip(picture, -2.5, 2.5).astype(np.float32)
    return found


def text_line(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """A light strip with dark strokes that look like a line of writing, values in -1..1."""
    *lead, height, width = shape
    page = np.full((height, width), 0.8) + rng.normal(0, 0.03, (height, width))
    x = int(rng.integers(2, 8))
    while x < width - 10:
        wide = int(rng.integers(6, 14))
        top, bottom = height // 5, height - height // 5
        for _ in range(int(rng.integers(2, 4))):
            if rng.random() < 0.5:
                at = x + int(rng.integers(0, wide))
                page[top:bottom, at : at + 3] = -0.8
            else:
                at = int(rng.integers(top, bottom - 2))
                page[at : at + 3, x : x + wide] = -0.8
        x += wide + int(rng.integers(2, 6))
    found: Floats = np.broadcast_to(np.clip(page, -1, 1), shape).astype(np.float32)
    return found


def text_page(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """A page with a few lines of writing on a textured ground."""
    *_, height, width = shape
    page = 0.3 * image(rng, (height, width)) + 0.5
    for line in range(20, height - 40, 60):
        page[line : line + 32] = text_line(rng, (32, width))
    found: Floats = np.broadcast_to(page, shape).astype(np.float32)
    return found


def pixels(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """A picture in 0..255, as detectors that normalise inside take it."""
    return (127.5 * (1 + np.clip(text_page(rng, shape), -1, 1))).astype(np.float32)


def speech(rng: np.random.Generator, samples: int) -> Floats:
    """Something like speech: a gliding pitch with formants, syllables, pauses and noise."""
    t = np.arange(samples) / RATE
    pitch = 120 + 30 * np.sin(2 * np.pi * rng.uniform(0.3, 1.0) * t + rng.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    formants = rng.uniform(300, 3000, 3)
    voice = np.zeros(samples)
    for harmonic in range(1, 30):
        distance = np.min(np.abs(formants[:, None] - harmonic * pitch[None]), axis=0)
        voice += np.exp(-distance / 250) * np.sin(harmonic * phase) / harmonic**0.5
    syllables = np.clip(np.sin(2 * np.pi * rng.uniform(2, 4) * t + rng.uniform(0, 6)), 0, None)
    noise = 0.005 * rng.standard_normal(samples)
    found: Floats = (0.15 * voice * syllables + noise).astype(np.float32)
    return found


def waveform(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Speech in the last dimension."""
    rows = [speech(rng, shape[-1]) for _ in range(int(np.prod(shape[:-1])))]
    return np.stack(rows).reshape(shape)


def spectrum(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Log power spectra of speech: the last two dimensions are frames and bins."""
    *lead, frames, bins = shape
    window = 2 * (bins - 1) if bins % 2 else 2 * bins
    hop = window // 2
    pictures = []
    for _ in range(int(np.prod(lead))):
        wave = speech(rng, hop * (frames + 1) + window)
        cut = np.stack([wave[i * hop : i * hop + window] for i in range(frames)])
        power = np.abs(np.fft.rfft(cut * np.hanning(window), axis=1))[:, :bins] ** 2
        pictures.append(np.log10(np.maximum(power, 1e-10)))
    return np.stack(pictures).reshape(shape).astype(np.float32)


def scaled_spectrum(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Decibels below the loudest bin, 80 of them mapped to -1..1, as quality models take them."""
    decibels = 10 * spectrum(rng, shape)
    decibels -= decibels.max(axis=(-2, -1), keepdims=True)
    found: Floats = np.clip((decibels + 40) / 40, -1, 1).astype(np.float32)
    return found


def features(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Filter-bank features: bands first, frames last."""
    *lead, bands, frames = shape
    found = spectrum(rng, (*lead, frames, bands))
    return np.ascontiguousarray(np.swapaxes((found + 4) / 3, -1, -2))


def zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """A state at its start."""
    del rng
    return np.zeros(shape, np.float32)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Dense features of unit scale."""
    return rng.standard_normal(shape).astype(np.float32)


def file_bytes(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """The bytes of files: Python source, JSON, comma-separated numbers, markup or noise."""
    *lead, size = shape
    rows = [_one_file(rng, size) for _ in range(int(np.prod(lead)))]
    return np.stack(rows).reshape(shape)


def _one_file(rng: np.random.Generator, size: int) -> NDArray[np.int32]:
    numbers = rng.integers(0, 1000, size)
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: inspect.getsource(argparse).encode(),
        lambda: json.dumps({str(i): int(n) for i, n in enumerate(numbers)}).encode(),
        lambda: "\n".join(",".join(map(str, row)) for row in numbers.reshape(-1, 8)).encode(),
        lambda: "".join(f"<li class='c{n}'>{n}</li>\n" for n in numbers).encode(),
        lambda: rng.integers(0, 256, size).astype(np.uint8).tobytes(),
    )
    content = kinds[int(rng.integers(len(kinds)))]()
    start = int(rng.integers(0, max(len(content) - size, 1)))
    piece = np.frombuffer(content[start : start + size], np.uint8).astype(np.int32)
    padded = np.full(size, 256, np.int32)
    padded[: len(piece)] = piece
    return padded


def tokens(limit: int) -> Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.int64]]:
    """Token ids with the rank statistics of text (Zipf), below `limit`."""

    def make(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int64]:
        return np.minimum(rng.zipf(1.3, shape), limit) - 1

    return make


def input_set(rng: np.random.Generator, inputs: Sequence[Input]) -> dict[str, NDArray[np.generic]]:
    """One input set."""
    return {i.name: i.make(rng, i.shape) for i in inputs}
