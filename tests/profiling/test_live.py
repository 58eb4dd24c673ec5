"""LiveBytes against cases small enough to count by hand."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from gistkit.runtime.live import LiveBytes

KB = 1024


def block(kb: int = 1) -> torch.Tensor:
    """A float tensor of ``kb`` KiB."""
    return torch.ones(kb * 256)


def test_temporaries_raise_the_peak_and_leave():
    with LiveBytes() as live:
        a = block(4)
        b = a + 1
        del a
        c = b * 2
        del b
        assert live.current_bytes == 4 * KB
    assert live.peak_bytes == 8 * KB
    assert [e.nbytes // KB for e in live.timeline] == [4, 8, 8]
    assert [e.op for e in live.timeline] == ["aten::ones", "aten::add", "aten::mul"]
    del c
    assert live.current_bytes == 0


def test_what_was_there_before_does_not_count_unless_tracked():
    weight, x = block(4).requires_grad_(), block(4)
    with LiveBytes() as live:
        transposed = weight.view(32, 32).t()
        y = x.mul_(2).view(-1)
        assert live.current_bytes == 0
        live.track(weight)
        assert live.current_bytes == 4 * KB == live.peak_bytes
        live.track(torch.nn.Linear(16, 16, bias=False), weight)
        assert live.current_bytes == 4 * KB
    del transposed, y, weight
    assert live.current_bytes == 0


def test_track_takes_modules_and_refuses_the_rest():
    module = torch.nn.BatchNorm1d(256)
    live = LiveBytes()
    live.track(module)
    assert live.current_bytes == 4 * KB + 8
    with pytest.raises(TypeError, match=r"track\(\) takes tensors and modules, got list; pass its tensors"):
        live.track([module])  # type: ignore[arg-type]


def test_forward_and_backward_of_one_layer_by_hand():
    """x (64x64, 16 KiB) and w from before. Kept: a = x @ w (dead once relu has run), y (kept by relu), the loss."""
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    with LiveBytes() as live:
        loss = torch.relu(x @ w).sum()
        assert live.mark("forward end") == 16 * KB + 4
        assert live.peak_bytes == 32 * KB
        live.reset_peak()
        loss.backward()
        # y, ones_like(loss) and the masked gradient; then y is gone and w.grad = x.t() @ grad is new.
        assert live.peak_bytes == 32 * KB + 8
        assert live.current_bytes == 16 * KB + 4
    assert {e.op for e in live.timeline if e.backward} >= {"aten::threshold_backward", "aten::mm"}
    assert not any(e.backward for e in live.timeline[: live.marks[0].index])
    # Tensor.backward makes its ones_like before the engine starts.
    assert all(e.backward for e in live.timeline[live.marks[0].index + 1 :])
    assert w.grad is not None and live.current_bytes == w.grad.untyped_storage().nbytes() + 4


def test_saved_tensor_hooks_see_their_packed_form_counted():
    x = torch.randn(256, requires_grad=True)
    with LiveBytes() as live:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.float16), lambda t: t.float()):
            loss = x.exp().sum()
        assert live.current_bytes == KB // 2 + 4
        loss.backward()
        assert live.current_bytes == KB + 4
    assert x.grad is not None


def test_a_custom_operator_is_one_event_and_hides_its_temporaries():
    library = torch.library.Library("gistkit_live_test", "FRAGMENT")
    library.define("halve(Tensor x) -> Tensor")
    library.impl("halve", lambda x: (x.double() * 0.5).float()[: x.numel() // 2].clone(), "CPU")
    x = block(4)
    with LiveBytes() as live:
        y = torch.ops.gistkit_live_test.halve(x)
    assert [e.op for e in live.timeline] == ["gistkit_live_test::halve"]
    assert live.peak_bytes == live.current_bytes == 2 * KB == y.untyped_storage().nbytes()


def test_fake_tensors_count_their_nominal_bytes_where_the_block_is_fake_alone():
    with FakeTensorMode(), LiveBytes() as live:
        x = torch.empty(1 << 40, requires_grad=True)
        loss = x.exp().sum()
        del x
        assert live.current_bytes == (2 << 42) + 4
        del loss
        assert live.current_bytes == 0
    assert live.peak_bytes == (2 << 42) + 4
    with LiveBytes() as live:  # in a real block they weigh nothing
        with FakeTensorMode():
            fake = torch.empty(1 << 20).relu()
        meta = torch.empty(1 << 20, device="meta").relu()
        assert live.current_bytes == live.peak_bytes == 0
    del fake, meta


def test_nothing_is_kept_alive_and_an_exception_leaves_nothing():
    live = LiveBytes()
    with pytest.raises(RuntimeError, match="must match"), live:
        torch.ones(3) + torch.ones(4)
    gc.collect()
    assert live.current_bytes == 0
    with live:
        a = block(4)
        b = block(1) + 1
    assert live.current_bytes == 5 * KB
    del a, b
    assert live.current_bytes == 0


def test_entering_twice_is_an_error_and_nesting_works():
    with LiveBytes() as outer:
        a = block(1)
        with LiveBytes() as inner:
            b = a + block(2)[:256]
        with pytest.raises(RuntimeError, match="active already; make a new one"), outer:
            pass
    assert inner.current_bytes == KB and outer.current_bytes == 2 * KB
    del b


def test_other_threads_are_not_seen():
    made = []
    with LiveBytes() as live:
        thread = threading.Thread(target=lambda: made.append(block(4)))
        thread.start()
        thread.join()
    assert live.timeline == [] and live.current_bytes == 0


OPS = st.lists(
    st.tuples(st.sampled_from(["new", "add", "view", "drop", "inplace", "grow"]), st.integers(0, 7)), max_size=40
)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(OPS)
def test_any_sequence_of_making_and_dropping(program):
    """Against a plain list of the storages that are held: current after every step, peak over all."""
    held: list[torch.Tensor] = []
    peak = 0
    with LiveBytes() as live, LiveBytes(timeline=False) as unasked:
        for op, i in program:
            if op == "new":
                held.append(torch.empty(i + 1))
            elif held:
                tensor = held[i % len(held)]
                if op == "add":
                    held.append(tensor + 1)
                elif op == "view":
                    held.append(tensor[:1])
                elif op == "inplace":
                    tensor.add_(1)
                elif op == "grow":
                    tensor.resize_(tensor.numel() + i)
                else:
                    del held[i % len(held)]
                del tensor
            sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
            peak = max(peak, sum(sizes.values()))
            assert live.current_bytes == sum(sizes.values())
    assert live.peak_bytes == unasked.peak_bytes == peak
    assert unasked.timeline == [] and unasked.current_bytes == live.current_bytes


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
