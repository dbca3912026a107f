"""Architectures of the corpus for text, sound, clicks, points and graphs, trained here or random.

Owns the definitions alone; `zoo_architectures.py` has the blocks they share, `zoo_export.py` writes
them down, `routepilot.training.zoo_train` trains them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from routepilot.env.zoo_architectures import Block, LlamaBlock, conv, rotate
from routepilot.env.zoo_data import CHARACTERS, KEYWORDS, ROWS, SOLIDS, SYMBOLS, TABLES, TAGS

#: Width, heads and blocks of the character models; longest text of the one with learned places.
WIDTH, HEADS, BLOCKS, LONGEST = 128, 4, 3, 256


class _CharGpt(nn.Module):
    """Decoder of Llama's kind over characters: prefill of a whole text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CHARACTERS, WIDTH)
        self.blocks = nn.Sequential(*(LlamaBlock(WIDTH, HEADS) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, CHARACTERS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.words(tokens)))
        return out

    def cache(self, tokens: Tensor) -> Tensor:
        """Rotated keys and values of a text, (2, blocks, batch, heads, steps, width a head)."""
        x = self.words(tokens)
        kept = []
        block: Any
        for block in self.blocks:
            q, k, v = _heads(block.attention.into(block._norm(x, block.one)))
            del q
            kept.append(torch.stack([rotate(k), v]))
            x = block(x)
        return torch.stack(kept, 1)


def _heads(x: Tensor) -> list[Tensor]:
    batch, steps, width = x.shape
    return [
        t.reshape(batch, steps, HEADS, width // 3 // HEADS).transpose(1, 2) for t in x.chunk(3, -1)
    ]


class _CharGptStep(_CharGpt):
    """The same model at work: one token, a cache of what went before, the cache's new column."""

    def forward(self, tokens: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.words(tokens)
        columns = []
        block: Any
        for place, block in enumerate(self.blocks):
            q, k, v = _heads(block.attention.into(block._norm(x, block.one)))
            past = cache.shape[-2]
            q, k = rotate(q, past), rotate(k, past)
            columns.append(torch.stack([k, v]))
            keys = torch.cat([cache[0, place], k], 2)
            values = torch.cat([cache[1, place], v], 2)
            scores = q @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
            y = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
            x = x + block.attention.out(y)
            z = block._norm(x, block.two)
            x = x + block.down(F.silu(block.gate(z)) * block.up(z))
        return self.head(x), torch.stack(columns, 1)


class _CharBert(nn.Module):
    """Encoder over characters with learned places and norms after each step, a tag a character."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS, post=True) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, TAGS)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1]))
        out: Tensor = self.head(self.blocks(self.norm(self.words(tokens) + places)))
        return out


class _CharGru(nn.Module):
    """Two GRU layers over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CHARACTERS, 96)
        self.core = nn.GRU(96, 192, 2, batch_first=True)
        self.head = nn.Linear(192, CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        y, _ = self.core(self.words(tokens))
        out: Tensor = self.head(y)
        return out


class _Retention(nn.Module):
    """Linear attention with a decay a head, in its parallel form (no softmax)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.norm = nn.GroupNorm(HEADS, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        *qkv, gate = self.into(x).chunk(4, -1)
        q, k, v = (t.reshape(batch, steps, HEADS, width // HEADS).transpose(1, 2) for t in qkv)
        rates = 1 - 2.0 ** (-2.0 - torch.arange(HEADS, dtype=torch.float64))
        gap = torch.arange(steps)[:, None] - torch.arange(steps)[None]
        decay = torch.where(gap >= 0, rates[:, None, None] ** gap.clamp(min=0), 0.0).float()
        y = (q @ k.transpose(-2, -1) * (width // HEADS) ** -0.5 * decay) @ v
        y = self.norm(y.transpose(1, 2).reshape(batch * steps, width)).reshape(batch, steps, width)
        out: Tensor = self.out(y * F.silu(gate))
        return out


class _StateSpace(nn.Module):
    """Diagonal state space as the long causal convolution that it is."""

    def __init__(self, width: int, states: int = 8, length: int = 64) -> None:
        super().__init__()
        self.length = length
        self.rate = nn.Parameter(torch.linspace(-4.0, 0.5, states).repeat(width, 1))
        self.weight = nn.Parameter(torch.randn(width, states) * 0.3)
        self.skip = nn.Parameter(torch.ones(width))
        self.into, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.into(x).chunk(2, -1)
        time = torch.arange(self.length - 1, -1, -1)
        kernel = (self.weight[..., None] * torch.exp(-self.rate.exp()[..., None] * time)).sum(1)
        z = y.transpose(1, 2)
        long = F.conv1d(F.pad(z, (self.length - 1, 0)), kernel[:, None], groups=z.shape[1])
        out: Tensor = self.out((long + self.skip[:, None] * z).transpose(1, 2) * F.silu(gate))
        return out


class _CharMixed(nn.Module):
    """A character model whose blocks mix over time by `core`, then by a feed-forward layer."""

    def __init__(self, core: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(CHARACTERS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * BLOCKS + 1))
        self.cores = nn.ModuleList(core(WIDTH) for _ in range(BLOCKS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for i, (core, mlp) in enumerate(zip(self.cores, self.mlps, strict=True)):
            x = x + core(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        out: Tensor = self.head(self.norms[-1](x))
        return out


class _Sorter(nn.Module):
    """Encoder and decoder with cross attention; the decoder's causal mask is its own."""

    def __init__(self, width: int = 128, heads: int = 4, depth: int = 2, length: int = 48) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(length, width)
        self.encoder = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.decoder = nn.ModuleList(_Crossed(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.words(source) + self.places(torch.arange(source.shape[1])))
        y = self.words(target) + self.places(torch.arange(target.shape[1]))
        for block in self.decoder:
            y = block(y, memory)
        out: Tensor = self.head(y)
        return out


class _Crossed(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.own_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ask, self.tell = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.own(self.norms[0](x)).chunk(3, -1)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, steps, width = q.shape
        q, k, v = (
            t.reshape(batch, -1, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        if mask is not None:
            scores = scores + mask
        y = (scores.softmax(-1) @ v).transpose(1, 2)
        return y.reshape(batch, steps, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        steps = x.shape[1]
        mask = torch.triu(torch.full((steps, steps), -1e4), diagonal=1)
        x = x + self.own_out(self._attend(*self._split(x), mask))
        k, v = self.tell(memory).chunk(2, -1)
        x = x + self.out(self._attend(self.ask(self.norms[1](x)), k, v, None))
        out: Tensor = x + self.mlp(self.norms[2](x))
        return out


def keywords_dscnn() -> nn.Module:
    """Depthwise-separable convolutions over log spectra, as keyword spotters are."""
    layers: list[nn.Module] = [conv(1, 64, 5, 2), nn.ReLU()]
    for _ in range(4):
        layers += [conv(64, 64, 3, groups=64), nn.ReLU(), conv(64, 64, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, KEYWORDS))


class _Crosses(nn.Module):
    """Deep and cross network over a click log."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, width) for _ in range(TABLES))
        total = TABLES * width + 8
        self.crosses = nn.ModuleList(nn.Linear(total, total) for _ in range(2))
        self.deep = nn.Sequential(
            nn.Linear(total, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64)
        )
        self.head = nn.Linear(total + 64, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        rows = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        first = torch.cat([dense, *rows], 1)
        x = first
        for cross in self.crosses:
            x = x + first * cross(x)
        out: Tensor = self.head(torch.cat([x, self.deep(first)], 1))[:, 0]
        return out


def _pointwise(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in zip(widths, widths[1:], strict=False):
        layers += [nn.Conv1d(inner, outer, 1, bias=False), nn.BatchNorm1d(outer), nn.ReLU()]
    return nn.Sequential(*layers)


class _PointNet(nn.Module):
    """Points one by one, their maximum joined to each, and a maximum again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = _pointwise(3, 64, 64), _pointwise(128, 128, 256)
        self.head = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, SOLIDS))

    def forward(self, points: Tensor) -> Tensor:
        y = self.one(points)
        most = y.amax(2, keepdim=True).expand(-1, -1, y.shape[2])
        out: Tensor = self.head(self.two(torch.cat([y, most], 1)).amax(2))
        return out


class _GraphNet(nn.Module):
    """Messages along the edges of a graph, four rounds, an answer a node."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.others = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.head = nn.Linear(width, 1)

    def forward(self, adjacency: Tensor, features: Tensor) -> Tensor:
        x = F.relu(self.first(features))
        for own, others, norm in zip(self.own, self.others, self.norms, strict=True):
            x = x + F.relu(own(norm(x)) + adjacency @ others(norm(x)))
        out: Tensor = self.head(x)[..., 0]
        return out


class _Conformer(nn.Module):
    """Conformer-like speech encoder with random weights: attention and convolution by turns."""

    def __init__(self, width: int = 144, depth: int = 4) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(40, width, 3, 2, 1), nn.ReLU(), nn.Conv1d(width, width, 3, 2, 1), nn.ReLU()
        )
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.wides = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(depth))
        self.deeps = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, width, 15, padding=7, groups=width),
                nn.BatchNorm1d(width),
                nn.SiLU(),
                nn.Conv1d(width, width, 1),
            )
            for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, 200)

    def forward(self, x: Tensor) -> Tensor:
        y = self.front(x).transpose(1, 2)
        for block, wide, deep, norm in zip(
            self.blocks, self.wides, self.deeps, self.norms, strict=True
        ):
            y = block(y)
            y = y + 0.5 * deep(F.glu(wide(norm(y).transpose(1, 2)), 1)).transpose(1, 2)
        out: Tensor = self.head(y)
        return out


#: Name -> definition, trained here.
TRAINED: dict[str, Callable[[], nn.Module]] = {
    "char_gpt": _CharGpt,
    "char_bert": _CharBert,
    "char_gru": _CharGru,
    "char_retention": lambda: _CharMixed(_Retention),
    "char_ssm": lambda: _CharMixed(_StateSpace),
    "sorter": _Sorter,
    "keywords_dscnn": keywords_dscnn,
    "clicks_dcn": _Crosses,
    "points_pointnet": _PointNet,
    "graph_net": _GraphNet,
}

#: Other forms of a trained model: the same weights in another graph.
FORMS: dict[str, Callable[[], nn.Module]] = {"char_gpt@step": _CharGptStep}

#: Name -> definition with random weights.
RANDOM: dict[str, Callable[[], nn.Module]] = {"conformer": _Conformer}
