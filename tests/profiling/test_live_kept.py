"""Bytes that a forward keeps for backward, against autograd's own list of saved tensors."""

import torch
import torch.nn.functional as F

from gistkit.runtime.live import LiveBytes


def graph_bytes(loss: torch.Tensor, outside: set[int]) -> int:
    """Oracle: bytes of the distinct storages that autograd's nodes hold, by their ``_saved_*`` attributes."""
    sizes, nodes, seen = {}, [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [n for n, _ in node.next_functions]
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(value, torch.Tensor):
                sizes[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    return sum(size for cdata, size in sizes.items() if cdata not in outside)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(72, 5)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.bn(self.conv(x))), 2).flatten(1))


def test_kept_bytes_of_a_network_equals_what_its_graph_holds():
    torch.manual_seed(0)
    net, x, t = Net(), torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    tensors = [*net.parameters(), *net.buffers(), x, t]
    loss = F.cross_entropy(net(x), t)
    expected = graph_bytes(loss, {p.untyped_storage()._cdata for p in tensors})
    # The loss itself, 4 bytes, is alive but saved by nobody.
    with LiveBytes(timeline=False) as live:
        loss = F.cross_entropy(net(x), t)
        kept = live.current_bytes
    assert expected > 0 and kept == expected + 4
