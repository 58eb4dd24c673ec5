"""LiveBytes against cases small enough to count by hand."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from gistkit.runtime.live import LiveBytes

KB = 1024
OPS = st.lists(
    st.tuples(st.sampled_from(["new", "add", "view", "drop", "inplace", "grow"]), st.integers(0, 7)), max_size=40
)


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
