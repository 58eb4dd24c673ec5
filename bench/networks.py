"""Networks of the benchmarks that the zoo has not: DenseNet-121, a small transformer, GPT-2 and a small Llama, and for
images of 32x32 VGG-16 with batch norm and a small Inception, in plain ``torch.nn``."""

from __future__ import annotations

import torch
from torch import nn

from gistkit import zoo


class DenseLayer(nn.Module):
    """BN, ReLU, 1x1 to 4 x growth, BN, ReLU, 3x3 to growth, joined to its input (Huang et al., CVPR 2017)."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet121(num_classes: int = 1000, blocks: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32) -> nn.Sequential:
    """DenseNet-121: 7,978,856 parameters with 1,000 classes."""
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    for number, count in enumerate(blocks):
        for _ in range(count):
            layers.append(DenseLayer(channels, growth))
            channels += growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        if number < len(blocks) - 1:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class Transformer(nn.Module):
    """Encoder layers over token embeddings, a class for every position; no dropout."""

    def __init__(self, tokens: int = 8192, width: int = 512, depth: int = 8) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        self.embedding, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(x))).transpose(1, 2)


def vgg16_bn(num_classes: int = 10, image_size: int = 32) -> nn.Module:
    """The zoo's VGG-16 with a batch norm behind every convolution."""
    model = zoo.vgg16(num_classes=num_classes, image_size=image_size)
    features: list[nn.Module] = []
    for layer in model.get_submodule("features").children():
        features += [layer, nn.BatchNorm2d(layer.out_channels)] if isinstance(layer, nn.Conv2d) else [layer]
    model.add_module("features", nn.Sequential(*features))
    return model


def inception(num_classes: int = 10, image_size: int = 32) -> nn.Module:
    """Modules 3a, 3b, 4a and 4b of the zoo's GoogLeNet behind one 3x3 convolution, without norms."""
    blocks = zoo.googlenet(num_classes=num_classes, image_size=image_size).get_submodule("blocks")
    stem = nn.Conv2d(3, 192, 3, padding=1)
    nn.init.kaiming_normal_(stem.weight, nonlinearity="relu")
    middle = [blocks.get_submodule(n) for n in ("inception3a", "inception3b", "maxpool3", "inception4a", "inception4b")]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(512, num_classes)
    return nn.Sequential(stem, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, ceil_mode=True), *middle, *ends)


class Block(nn.Module):
    """A pre-norm block of GPT-2: causal attention and an MLP of four times the width with tanh's GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gelu, self.down = nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2 small without dropout: 12 blocks of 768, 124 million parameters with 50,304 tokens, tied embeddings."""

    def __init__(self, tokens: int = 50304, length: int = 1024, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places[: x.shape[1]])))


class RMSNorm(nn.Module):
    """As Hugging Face writes it: in fp32, then in the stream's dtype times the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary places in queries or keys."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class LlamaBlock(nn.Module):
    """A block of Llama: RMS norms, causal attention with rotary places, a gated MLP with SiLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, inner = heads, width * 8 // 3
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A small Llama: 12 blocks of 768, 124 million parameters with 50,304 tokens, tied embeddings."""

    def __init__(self, tokens: int = 50304, length: int = 1024, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, width // 64) for _ in range(depth))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, 64, 2) / 64)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, length = self.tokens(x), x.shape[1]
        cos, sin = self.cos[:length].to(y.dtype), self.sin[:length].to(y.dtype)  # type: ignore[index]
        for block in self.blocks:
            y = block(y, cos, sin)
        return self.head(self.norm(y))
