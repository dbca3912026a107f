"""Architectures of the corpus whose weights are random: small definitions, exported once.

Owns the definitions and their export. Seeds are fixed and batch statistics warmed, so an export
gives the same fingerprint everywhere. Needs torch and onnxscript (extra `zoo`); imported when used.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Passes in training mode that give batch normalisation its statistics.
WARM_PASSES = 8


def export(name: str, inputs: Sequence[Tensor], names: Sequence[str], path: Path) -> None:
    """Export an architecture as ONNX.

    Args:
        name: Key of `ARCHITECTURES`.
        inputs: Example inputs, which also warm batch statistics.
        names: Their names in the graph.
        path: File to write.
    """
    model = make(name, inputs)
    write_onnx(model, inputs, names, ["output"], path)


def make(name: str, inputs: Sequence[Tensor]) -> nn.Module:
    """An architecture ready to run: seeded weights, batch statistics warmed with the inputs."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name]()
    _scale(model)
    model.train()
    with torch.no_grad():
        for _ in range(WARM_PASSES):
            model(*inputs)
    return model.eval()


def write_onnx(
    model: nn.Module | torch.export.ExportedProgram,
    inputs: Sequence[Tensor],
    names: Sequence[str],
    outputs: Sequence[str],
    path: Path,
) -> None:
    """Write a module or an exported program as an ONNX file with these names, quietly."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                tuple(inputs),
                str(path),
                input_names=list(names),
                output_names=list(outputs),
                opset_version=18,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    finally:
        logging.disable(logging.NOTSET)


def _scale(model: nn.Module) -> None:
    """Weights that keep signals alive through the depth: He for convolutions, small for tables."""
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)


def _conv(
    inner: int, outer: int, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outer),
    )


class _Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(inner, outer, 3, stride), nn.ReLU(), _conv(outer, outer))
        same = inner == outer and stride == 1
        self.side: nn.Module = nn.Identity() if same else _conv(inner, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.side(x))


def resnet() -> nn.Module:
    """ResNet-18 with 48 channels."""
    widths = (48, 96, 192, 384)
    layers: list[nn.Module] = [_conv(3, 48, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inner = 48
    for i, width in enumerate(widths):
        layers += [_Residual(inner, width, 1 if i == 0 else 2), _Residual(width, width, 1)]
        inner = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 500))


class _Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean((2, 3), keepdim=True)
        out: Tensor = x * F.hardsigmoid(self.wide(F.relu(self.narrow(scale))))
        return out


class _Inverted(nn.Module):
    def __init__(
        self, inner: int, outer: int, stride: int, kernel: int, act: type[nn.Module]
    ) -> None:
        super().__init__()
        wide = 4 * inner
        self.body = nn.Sequential(
            _conv(inner, wide, 1),
            act(),
            _conv(wide, wide, kernel, stride, groups=wide),
            act(),
            _Gate(wide),
            _conv(wide, outer, 1),
        )
        self.skip = inner == outer and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.skip else y


def _mobile(act: type[nn.Module], kernel: int) -> nn.Module:
    layers: list[nn.Module] = [_conv(3, 16, 3, 2), act()]
    inner = 16
    for width, stride in ((24, 2), (24, 1), (40, 2), (40, 1), (80, 2), (80, 1), (112, 1), (160, 2)):
        layers.append(_Inverted(inner, width, stride, kernel, act))
        inner = width
    layers += [_conv(inner, 480, 1), act(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(480, 500))


def mobilenet() -> nn.Module:
    """MobileNet-v3-like: inverted residuals, squeeze-excite, hard swish."""
    return _mobile(nn.Hardswish, 3)


def efficientnet() -> nn.Module:
    """EfficientNet-like: the same skeleton with SiLU and 5x5 depthwise kernels."""
    return _mobile(nn.SiLU, 5)


class _Dense(nn.Module):
    def __init__(self, inner: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet() -> nn.Module:
    """DenseNet-like: three blocks of five layers, growth 24."""
    layers: list[nn.Module] = [_conv(3, 48, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 48
    for block in range(3):
        for _ in range(5):
            layers.append(_Dense(width, 24))
            width += 24
        if block < 2:
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1)]
            layers.append(nn.AvgPool2d(2))
            width //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 500))


class _ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.spread(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        out: Tensor = x + y
        return out


def convnext() -> nn.Module:
    """ConvNeXt-like: four stages of two blocks."""
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 4, 4)]
    width = 48
    for stage in range(4):
        layers += [_ConvNextBlock(width), _ConvNextBlock(width)]
        if stage < 3:
            layers.append(nn.Conv2d(width, 2 * width, 2, 2))
            width *= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 500))


class _Attention(nn.Module):
    def __init__(
        self, width: int, heads: int, *, causal: bool = False, rotary: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.rotary = heads, causal, rotary
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        q, k, v = self.into(x).chunk(3, -1)
        q, k, v = (
            t.reshape(batch, steps, self.heads, width // self.heads).transpose(1, 2)
            for t in (q, k, v)
        )
        if self.rotary:
            q, k = _rotate(q), _rotate(k)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        if self.causal:
            mask = torch.triu(torch.full((steps, steps), -1e4), diagonal=1)
            scores = scores + mask
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, steps, width)
        out: Tensor = self.out(y)
        return out


def _rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * rates[None]
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, *, post: bool = False) -> None:
        super().__init__()
        self.post = post
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.one(x + self.attention(x))
            y: Tensor = self.two(x + self.mlp(x))
            return y
        x = x + self.attention(self.one(x))
        out: Tensor = x + self.mlp(self.two(x))
        return out


class _Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 256, 16, 16)
        self.places = nn.Parameter(torch.randn(1, 101, 256) * 0.1)
        self.token = nn.Parameter(torch.randn(1, 1, 256))
        self.blocks = nn.Sequential(*(_Block(256, 4) for _ in range(6)))
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 500)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], 1) + self.places
        out: Tensor = self.head(self.norm(self.blocks(y))[:, 0])
        return out


class _Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(8000, 320), nn.Embedding(96, 320)
        self.norm = nn.LayerNorm(320)
        self.blocks = nn.Sequential(*(_Block(320, 5, post=True) for _ in range(5)))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        out: Tensor = self.blocks(self.norm(self.words(tokens) + self.places(places)))
        return out


class _LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(width))
        self.two = nn.Parameter(torch.ones(width))
        self.attention = _Attention(width, heads, causal=True, rotary=True)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    @staticmethod
    def _norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self._norm(x, self.one))
        y = self._norm(x, self.two)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class _Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4000, 320)
        self.blocks = nn.Sequential(*(_LlamaBlock(320, 5) for _ in range(4)))
        self.head = nn.Linear(320, 4000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.words(tokens))[:, -8:])
        return out


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(40, 128, 5, 2, 2)
        self.core = nn.LSTM(128, 160, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(320, 60)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.core(F.relu(self.front(x)).transpose(1, 2))
        out: Tensor = self.head(y)
        return out


class _MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 192), nn.GELU(), nn.Linear(192, tokens))
        self.along = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.one(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.along(self.two(x))
        return out


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 256, 16, 16)
        self.blocks = nn.Sequential(*(_MixerBlock(100, 256) for _ in range(6)))
        self.head = nn.Linear(256, 500)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        out: Tensor = self.head(y.mean(1))
        return out


class _Unet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def stage(inner: int, outer: int) -> nn.Sequential:
            return nn.Sequential(_conv(inner, outer), nn.SiLU(), _conv(outer, outer), nn.SiLU())

        self.downs = nn.ModuleList(
            [stage(3, width), stage(width, 2 * width), stage(2 * width, 4 * width)]
        )
        self.ups = nn.ModuleList(
            [
                nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
                nn.ConvTranspose2d(2 * width, width, 2, 2),
            ]
        )
        self.joins = nn.ModuleList([stage(4 * width, 2 * width), stage(2 * width, width)])
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, down in enumerate(self.downs):
            x = down(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for up, join, old in zip(self.ups, self.joins, kept[-2::-1], strict=True):
            x = join(torch.cat([up(x), old], 1))
        out: Tensor = self.head(x)
        return out


class _Dlrm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(4000, 32) for _ in range(12))
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(110, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )
        rows, columns = torch.tril_indices(13, 13, -1)
        self.pairs: Tensor
        self.register_buffer("pairs", rows * 13 + columns)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        rows = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack([bottom, *rows], 1)
        crossed = (stacked @ stacked.transpose(1, 2)).flatten(1)[:, self.pairs]
        out: Tensor = self.top(torch.cat([bottom, crossed], 1)).sigmoid()
        return out


class _Tcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(1, 48, 16, 4, 6)
        self.steps = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(48, 96, 1),
                nn.PReLU(),
                nn.Conv1d(96, 96, 3, padding=2**i, dilation=2**i, groups=96),
                nn.PReLU(),
                nn.Conv1d(96, 48, 1),
            )
            for i in range(6)
        )
        self.head = nn.Conv1d(48, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.front(x)
        for step in self.steps:
            y = y + 0.5 * step(y)
        out: Tensor = self.head(y)
        return out


#: Name -> definition.
ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "resnet": resnet,
    "mobilenet": mobilenet,
    "efficientnet": efficientnet,
    "densenet": densenet,
    "convnext": convnext,
    "vit": _Vit,
    "bert": _Bert,
    "gpt": _Gpt,
    "bilstm": _Recurrent,
    "mixer": _Mixer,
    "unet": _Unet,
    "dlrm": _Dlrm,
    "tcn": _Tcn,
}
