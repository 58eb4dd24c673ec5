"""Small networks of kinds that the zoo lacks."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gistkit.zoo.concat import _Inception
from gistkit.zoo.resnet import Bottleneck, ResNet


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Checkpointed(nn.Sequential):
    """Layers under PyTorch's own checkpoint, whose forward runs again in backward."""

    def __init__(self, *layers: nn.Module, reentrant: bool = False) -> None:
        super().__init__(*layers)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def relu_chain(depth: int, width: int, bias: float) -> nn.Sequential:
    """ReLUs between convolutions, read by sign and by value; the higher the bias, the more they let pass."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(width if i else 3, width, 3, padding=1) for i in range(depth)]
    for conv in convs:
        nn.init.constant_(conv.bias, bias)
    layers = [m for conv in convs for m in (conv, nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class DenseNet(nn.Module):
    """Each layer reads the concatenation of all before it."""

    def __init__(self, classes: int = 10, layers: int = 5, growth: int = 8, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        widths = [width + i * growth for i in range(layers)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(w), nn.ReLU(), nn.Conv2d(w, growth, 3, padding=1)) for w in widths
        )
        self.classifier = nn.Linear(width + layers * growth, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.classifier(x.mean((2, 3)))


def bottlenecks() -> ResNet:
    """ResNet-50 with 5 of its 16 blocks: every stage, a projection in each, a block without one."""
    return ResNet(Bottleneck, (1, 2, 1, 1), 10)


def inceptions() -> nn.Sequential:
    """A stem like GoogLeNet's, narrower, and three of its nine blocks: a pool between two of them, dropout."""
    stem = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)
    first, second = _Inception(16, (8, 12, 16, 4, 8, 8)), _Inception(40, (16, 12, 24, 4, 8, 8))
    last = nn.MaxPool2d(3, 2), _Inception(56, (16, 16, 24, 4, 8, 8)), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*stem, first, second, *last, nn.Dropout(0.4), nn.Linear(56, 10))


def convolutions() -> nn.Sequential:
    """VGG-16, narrower, with seven of its thirteen convolutions."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((16, 2), (32, 2), (64, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = nn.Linear(1024, 64), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(64, 10)
    return nn.Sequential(*layers, nn.Flatten(), *head)


def _double(inside: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """Down, up, and a skip connection at each height; classes per pixel."""

    def __init__(self, classes: int = 4, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = _double(3, width), _double(width, 2 * width)
        self.bottom = _double(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge2, self.merge1 = _double(4 * width, 2 * width), _double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.up2(self.bottom(self.pool(second)))
        x = self.merge2(torch.cat([x, second], 1))
        x = self.merge1(torch.cat([self.up1(x), first], 1))
        return self.head(x)


def chain(groups: int) -> nn.Sequential:
    """Convolution, batch norm, ReLU: the ReLU's output is rebuilt from what the batch norm reads."""
    layers = [
        m for i in range(groups) for m in (nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).train()


class SqueezeExcite(nn.Module):
    """As squeeze-and-excitation has it: its product saves what it scales."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.wide(torch.relu(self.narrow(x.mean((2, 3), keepdim=True)))).sigmoid()


def gated_chain(groups: int) -> nn.Sequential:
    """The same with a gate behind every ReLU."""
    layers, gates = list(chain(groups)), [SqueezeExcite() for _ in range(groups)]
    return nn.Sequential(*[m for i, g in enumerate(gates) for m in (*layers[3 * i : 3 * i + 3], g)], *layers[-3:])


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.whole, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x, mask=None):
        rows, tokens, width = x.shape
        q, k, v = self.whole(self.first(x)).view(rows, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(seen))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Blocks(nn.Module):
    """A transformer of 6 blocks on images of 16 x 16 in 64 tokens."""

    kind = Block

    def __init__(self, dropout: float = 0.0, masked: bool = False) -> None:
        super().__init__()
        self.masked, self.patches = masked, nn.Conv2d(3, 32, 2, 2)
        self.blocks = nn.ModuleList(self.kind(32, dropout) for _ in range(6))
        self.head = nn.Linear(32, 10)

    def run(self, block: nn.Module, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return block(x, mask=mask)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        mask = torch.full((64, 64), -1e4, device=x.device).triu(1) if self.masked else None
        for block in self.blocks:
            x = self.run(block, x, mask)
        return self.head(x.mean(1))
