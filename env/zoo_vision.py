"""Architectures of the corpus that look at pictures and are trained here, and a few larger ones.

Owns the definitions alone; `zoo_architectures.py` has the blocks they share, `zoo_export.py` writes
them down, `routepilot.training.zoo_train` trains them. A definition that ends in post-processing
does it in evaluation mode only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from routepilot.env.zoo_architectures import (
    Block,
    ConvNextBlock,
    Dense,
    Inverted,
    MixerBlock,
    Residual,
    Unet,
    conv,
)

#: Sides of the detector's maps in cells for a side of 96 pixels, and its box sizes in 0..1.
DETECTOR_MAPS, DETECTOR_SIZES = (12, 6), (0.22, 0.36)

#: Boxes that the detector's post-processing looks at, and the overlap it allows.
DETECTOR_BOXES, DETECTOR_OVERLAP = 40, 0.45


def _classifier(body: list[nn.Module], width: int, classes: int) -> nn.Module:
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def digits_resnet() -> nn.Module:
    """Residual network of eight blocks, narrow."""
    layers: list[nn.Module] = [conv(3, 16, 3, 1), nn.ReLU()]
    inner = 16
    for width, stride in ((16, 1), (32, 2), (64, 2), (112, 2)):
        layers += [Residual(inner, width, stride), Residual(width, width, 1)]
        inner = width
    return _classifier(layers, inner, 10)


def digits_mobilenet() -> nn.Module:
    """Inverted residuals with squeeze-excite and hard swish, narrow."""
    layers: list[nn.Module] = [conv(3, 16, 3, 2), nn.Hardswish()]
    inner = 16
    for width, stride in ((16, 1), (24, 2), (24, 1), (40, 2), (40, 1), (64, 1)):
        layers.append(Inverted(inner, width, stride, 3, nn.Hardswish))
        inner = width
    return _classifier([*layers, conv(inner, 192, 1), nn.Hardswish()], 192, 10)


class _Patches(nn.Module):
    """Patches, places, blocks, mean, head."""

    def __init__(self, tokens: int, width: int, side: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, side, side)
        self.places = nn.Parameter(torch.randn(1, tokens, width) * 0.1)
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2) + self.places
        out: Tensor = self.head(self.norm(self.blocks(y)).mean(1))
        return out


def digits_vit() -> nn.Module:
    """Vision transformer: 64 tokens, four blocks."""
    return _Patches(64, 128, 8, [Block(128, 4) for _ in range(4)])


def digits_mixer() -> nn.Module:
    """MLP mixer: 64 tokens, five blocks."""
    return _Patches(64, 128, 8, [MixerBlock(64, 128) for _ in range(5)])


def textures_convnext() -> nn.Module:
    """ConvNeXt-like: three stages of two blocks."""
    layers: list[nn.Module] = [nn.Conv2d(3, 40, 4, 4)]
    width = 40
    for stage in range(3):
        layers += [ConvNextBlock(width), ConvNextBlock(width)]
        if stage < 2:
            layers.append(nn.Conv2d(width, 2 * width, 2, 2))
            width *= 2
    return _classifier(layers, width, 8)


def textures_densenet() -> nn.Module:
    """DenseNet-like: two blocks of six layers, growth 16."""
    layers: list[nn.Module] = [conv(3, 32, 5, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 32
    for block in range(2):
        for _ in range(6):
            layers.append(Dense(width, 16))
            width += 16
        if block == 0:
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1)]
            layers.append(nn.AvgPool2d(2))
            width //= 2
    return _classifier([*layers, nn.BatchNorm2d(width), nn.ReLU()], width, 8)


class _RegnetBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int, group: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(inner, outer, 1),
            nn.ReLU(),
            conv(outer, outer, 3, stride, groups=outer // group),
            nn.ReLU(),
            conv(outer, outer, 1),
        )
        self.side: nn.Module = nn.Identity() if stride == 1 else conv(inner, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.side(x))


def _regnet(widths: tuple[int, ...], depths: tuple[int, ...], classes: int) -> nn.Module:
    layers: list[nn.Module] = [conv(3, 32, 3, 2), nn.ReLU()]
    inner = 32
    for width, depth in zip(widths, depths, strict=True):
        layers.append(_RegnetBlock(inner, width, 2, 8))
        layers += [_RegnetBlock(width, width, 1, 8) for _ in range(depth - 1)]
        inner = width
    return _classifier(layers, inner, classes)


def textures_regnet() -> nn.Module:
    """RegNetX-like: grouped convolutions of width 8, three stages."""
    return _regnet((32, 72, 136), (1, 3, 4), 8)


def regnet() -> nn.Module:
    """RegNetX-like with random weights, four stages."""
    return _regnet((40, 80, 160, 320), (1, 2, 5, 3), 500)


class _Window(nn.Module):
    """A transformer block within windows of a map; every second one is shifted by half a window."""

    def __init__(self, width: int, heads: int, window: int, shift: bool) -> None:
        super().__init__()
        self.window, self.shift = window, window // 2 if shift else 0
        self.block = Block(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, wide, width = x.shape
        side = self.window
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        y = x.reshape(batch, height // side, side, wide // side, side, width)
        y = self.block(y.transpose(2, 3).reshape(-1, side * side, width))
        y = y.reshape(batch, height // side, wide // side, side, side, width)
        y = y.transpose(2, 3).reshape(batch, height, wide, width)
        return torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y


class _Swin(nn.Module):
    """Windowed transformer: two stages with patch merging between them."""

    def __init__(self, width: int, window: int, depth: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.one = nn.Sequential(*(_Window(width, 3, window, i % 2 == 1) for i in range(2)))
        self.merge = nn.Conv2d(width, 2 * width, 2, 2)
        self.two = nn.Sequential(*(_Window(2 * width, 6, window, i % 2 == 1) for i in range(depth)))
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(self.patches(x).permute(0, 2, 3, 1))
        y = self.two(self.merge(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        out: Tensor = self.head(self.norm(y).mean((1, 2)))
        return out


def textures_swin() -> nn.Module:
    """Windowed transformer over 24 x 24 patches, windows of 6."""
    return _Swin(48, 6, 2, 8)


def swin() -> nn.Module:
    """Windowed transformer with random weights, wider and deeper, windows of 5."""
    return _Swin(96, 5, 6, 500)


def scenes_unet() -> nn.Module:
    """U-Net that names the object at each pixel."""
    return Unet(16)


class _Detector(nn.Module):
    """Single-shot detector: two maps, three shapes of box a cell, top boxes, overlap suppression.

    In training it gives raw scores (batch, boxes, 1 + shapes) and offsets (batch, boxes, 4); in
    evaluation corners and scores of the best boxes, those that a better one hides with score 0.
    """

    anchors: Tensor

    def __init__(self, kinds: int = 3) -> None:
        super().__init__()
        self.kinds = kinds
        stem: list[nn.Module] = [conv(3, 16, 3, 2), nn.ReLU()]
        stem += [conv(16, 32, 3, 2), nn.ReLU(), Residual(32, 64, 2), Residual(64, 64, 1)]
        self.stem = nn.Sequential(*stem)
        self.deep = nn.Sequential(Residual(64, 96, 2), Residual(96, 96, 1))
        self.heads = nn.ModuleList(nn.Conv2d(w, 3 * (kinds + 5), 3, padding=1) for w in (64, 96))
        self.register_buffer("anchors", _anchors(), persistent=False)

    def raw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shallow = self.stem(x)
        rows = []
        for head, features in zip(self.heads, (shallow, self.deep(shallow)), strict=True):
            y = head(features).permute(0, 2, 3, 1)
            rows.append(y.reshape(x.shape[0], -1, self.kinds + 5))
        found = torch.cat(rows, 1)
        return found[..., : self.kinds + 1], found[..., self.kinds + 1 :]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, offsets = self.raw(x)
        if self.training:
            return scores, offsets
        return self.select(scores.softmax(-1)[..., 1:], self.corners(offsets))

    def corners(self, offsets: Tensor) -> Tensor:
        """Corners of the boxes that offsets from the anchors mean."""
        centre = self.anchors[:, :2] + 0.1 * offsets[..., :2] * self.anchors[:, 2:]
        size = self.anchors[:, 2:] * torch.exp(0.2 * offsets[..., 2:].clamp(-8, 8))
        return torch.cat([centre - size / 2, centre + size / 2], -1)

    def select(self, scores: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
        """The best boxes in order; kinds share one suppression, as objects do not overlap."""
        order = torch.topk(scores.amax(-1), DETECTOR_BOXES, dim=1).indices
        boxes = torch.gather(corners, 1, order[..., None].expand(-1, -1, 4))
        best = torch.gather(scores, 1, order[..., None].expand(-1, -1, self.kinds))
        overlap = overlaps(boxes, boxes)
        hides = torch.triu(overlap, diagonal=1).amax(1) > DETECTOR_OVERLAP
        return boxes, best * (~hides)[..., None]


def overlaps(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes (batch, n, 4) and (batch, m, 4): (batch, n, m)."""
    low = torch.maximum(a[:, :, None, :2], b[:, None, :, :2])
    high = torch.minimum(a[:, :, None, 2:], b[:, None, :, 2:])
    wide = (high - low).clamp(min=0)
    inner = wide[..., 0] * wide[..., 1]
    areas = [(t[..., 2] - t[..., 0]) * (t[..., 3] - t[..., 1]) for t in (a, b)]
    found: Tensor = inner / (areas[0][:, :, None] + areas[1][:, None] - inner + 1e-9)
    return found


def _anchors() -> Tensor:
    rows = []
    for side, size in zip(DETECTOR_MAPS, DETECTOR_SIZES, strict=True):
        places = (torch.arange(side) + 0.5) / side
        y, x = torch.meshgrid(places, places, indexing="ij")
        for_each = [
            torch.stack([x, y, torch.full_like(x, w), torch.full_like(x, h)], -1)
            for w, h in ((size, size), (0.75 * size, 0.75 * size), (1.25 * size, 1.25 * size))
        ]
        rows.append(torch.stack(for_each, 2).reshape(-1, 4))
    return torch.cat(rows)


class _Diffusion(nn.Module):
    """Denoiser of a diffusion model: residual blocks that are told the noise level, attention."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.level = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = _Told(width, width)
        self.shrink = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = _Told(2 * width, 2 * width)
        self.attention = Block(2 * width, 4)
        self.deep = _Told(2 * width, 2 * width)
        self.grow = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up = _Told(2 * width, width)
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        steps = torch.arange(16, dtype=torch.float64)
        rates = torch.exp(steps * (math.log(1000.0) / 16)).float()
        angles = level[:, None] * rates[None]
        told = self.level(torch.cat([angles.sin(), angles.cos()], -1))
        high = self.down(self.first(x), told)
        y = self.middle(self.shrink(high), told)
        batch, width, height, wide = y.shape
        tokens = self.attention(y.flatten(2).transpose(1, 2))
        y = self.deep(tokens.transpose(1, 2).reshape(batch, width, height, wide), told)
        y = self.up(torch.cat([self.grow(y), high], 1), told)
        out: Tensor = self.last(F.silu(y))
        return out


class _Told(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm, self.again = nn.GroupNorm(8, inner), nn.GroupNorm(8, outer)
        self.one = nn.Conv2d(inner, outer, 3, padding=1)
        self.two = nn.Conv2d(outer, outer, 3, padding=1)
        self.told = nn.Linear(128, outer)
        self.side: nn.Module = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        y = self.one(F.silu(self.norm(x))) + self.told(told)[:, :, None, None]
        out: Tensor = self.side(x) + self.two(F.silu(self.again(y)))
        return out


class _Fire(nn.Module):
    def __init__(self, inner: int, narrow: int, outer: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inner, narrow, 1)
        self.one = nn.Conv2d(narrow, outer // 2, 1)
        self.three = nn.Conv2d(narrow, outer // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(y)), F.relu(self.three(y))], 1)


def squeezenet() -> nn.Module:
    """SqueezeNet 1.1-like."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    layers += [_Fire(64, 16, 128), _Fire(128, 16, 128), nn.MaxPool2d(3, 2)]
    layers += [_Fire(128, 32, 256), _Fire(256, 32, 256), nn.MaxPool2d(3, 2)]
    layers += [_Fire(256, 48, 384), _Fire(384, 64, 512)]
    return _classifier(layers, 512, 500)


class _Shuffle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.body = nn.Sequential(
            conv(half, half, 1), nn.ReLU(), conv(half, half, 3, groups=half), conv(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, width, height, wide = x.shape
        kept, worked = x.chunk(2, 1)
        y = torch.cat([kept, F.relu(self.body(worked))], 1)
        y = y.reshape(batch, 2, width // 2, height, wide).transpose(1, 2)
        return y.reshape(batch, width, height, wide)


def shufflenet() -> nn.Module:
    """ShuffleNet-v2-like: channels split, worked on and shuffled."""
    layers: list[nn.Module] = [conv(3, 24, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inner = 24
    for width, depth in ((116, 3), (232, 7), (464, 3)):
        layers += [conv(inner, width, 3, 2, groups=4), nn.ReLU()]
        layers += [_Shuffle(width) for _ in range(depth)]
        inner = width
    return _classifier([*layers, conv(inner, 512, 1), nn.ReLU()], 512, 500)


def vgg() -> nn.Module:
    """VGG-11 at half width, without its wide dense layers."""
    layers: list[nn.Module] = []
    inner = 3
    for width, depth in ((32, 1), (64, 1), (128, 2), (256, 2), (256, 2)):
        for _ in range(depth):
            layers += [nn.Conv2d(inner, width, 3, padding=1), nn.ReLU()]
            inner = width
        layers.append(nn.MaxPool2d(2))
    return _classifier(layers, inner, 500)


#: Name -> definition, trained here.
TRAINED: dict[str, Callable[[], nn.Module]] = {
    "digits_resnet": digits_resnet,
    "digits_mobilenet": digits_mobilenet,
    "digits_vit": digits_vit,
    "digits_mixer": digits_mixer,
    "digits_diffusion": _Diffusion,
    "textures_convnext": textures_convnext,
    "textures_densenet": textures_densenet,
    "textures_regnet": textures_regnet,
    "textures_swin": textures_swin,
    "scenes_unet": scenes_unet,
    "scenes_ssd": _Detector,
}

#: Name -> definition with random weights.
RANDOM: dict[str, Callable[[], nn.Module]] = {
    "regnet": regnet,
    "swin": swin,
    "squeezenet": squeezenet,
    "shufflenet": shufflenet,
    "vgg": vgg,
}
