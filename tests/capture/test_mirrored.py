"""A step of another device is captured with the CPU's operators: cast as its autocast does, and copied as it does."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gistkit
from gistkit.capture.mirrored import MirroredDevice
from gistkit.capture.step.cuda_scratch import partial_bytes, scratch_bytes
from tests.support.graphs import Apply


def net():
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3))
    return nn.Sequential(*parts, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))


@pytest.fixture
def cuda_autocast():
    """CUDA's autocast as a machine with a device has it in its context."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


def squares(y):
    return nn.functional.mse_loss(y, torch.zeros_like(y))


def on_meta():
    return gistkit.plan(net().to("meta"), torch.empty(4, 3, 12, 12, device="meta"), hardware="h200", loss_fn=squares)


def test_a_plan_under_the_devices_autocast_is_that_of_its_narrow_tensors(cuda_autocast):
    made = on_meta()
    torch.set_autocast_enabled("cuda", False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gistkit.plan(net(), torch.empty(4, 3, 12, 12), hardware="h200", loss_fn=squares)
    assert made.peak_bytes == expected.peak_bytes
    assert made.prediction.plain_peak_bytes == expected.prediction.plain_peak_bytes
    assert made.prediction.plain_peak_bytes < on_meta().prediction.plain_peak_bytes


def test_operators_that_cudas_autocast_takes_in_fp32_are_so_and_cross_entropy_saves_narrow_logarithms(cuda_autocast):
    norms = Apply(lambda m, x: m[0](m[1](m[0](x)).softmax(-1)), nn.Linear(8, 8), nn.LayerNorm(8))
    x, y = torch.empty(4, 8, device="meta"), torch.empty(4, dtype=torch.long, device="meta")
    loss = nn.functional.cross_entropy
    graph = gistkit.capture(norms.to("meta"), (x,), backward=True, loss_fn=loss, targets=(y,))
    dtypes = {task.op: task.dtype for task in reversed(graph.tasks)}  # a forward's where it has both
    assert dtypes["layer_norm"] == dtypes["softmax"] == dtypes["NllLossBackward0"] == "float32"
    assert dtypes["linear"] == dtypes["LogSoftmaxBackward0"] == "bfloat16"


def test_a_group_norm_is_captured_with_the_copy_that_cudas_makes(cuda_autocast):
    last = torch.channels_last
    model = Apply(lambda m, x: m[1](m[0](x)), nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)).to("meta", memory_format=last)
    graph = gistkit.capture(model, (torch.empty(2, 8, 4, 4, device="meta").to(memory_format=last),), backward=True)
    norm = graph.calls[-1]
    saved = {s.storage: graph.storages[s.storage] for s in norm.saves}
    assert [s.dtype for s in saved.values() if s.producer == norm.index and s.shape == (2, 8, 4, 4)] == ["float32"]
    assert not any(s.producer == norm.index - 1 for s in saved.values())


def test_cudas_autocast_resizes_in_fp32_but_not_by_means(cuda_autocast):
    resize = nn.functional.interpolate
    model = Apply(lambda m, x: (resize(m[0](x), None, 2), resize(m[0](x), 2, mode="area")), nn.Conv2d(8, 8, 1))
    x = torch.empty(2, 8, 4, 4, device="meta")
    graph = gistkit.capture(model.to("meta"), (x,), backward=True)
    resized = [call.results[0] for call in graph.calls if call.op == "interpolate"]
    found = [graph.storages[graph.values[v].storage].nbytes for v in resized]
    assert found == [4 * 2 * 8 * 8 * 8, 2 * 2 * 8 * 2 * 2]


def test_a_models_own_context_for_its_tensors_device_holds(cuda_autocast):
    """As transformers' rotary places are computed, in fp32."""

    def forward(m, x):
        with torch.autocast(x.device.type, enabled=False):
            wide = m[0](x)
        return wide, m[0](wide)

    graph = gistkit.capture(
        Apply(forward, nn.Linear(8, 8)).to("meta"), (torch.empty(4, 8, device="meta"),), backward=True
    )
    made = [graph.values[c.results[0]].dtype for c in graph.calls if c.op == "linear"]
    assert made == ["float32", "bfloat16"]


@pytest.mark.parametrize(
    ("dtype", "heads", "width", "fused"),
    [("float32", 4, 8, True), ("float32", 2, 8, False), ("float32", 4, 6, False), ("bfloat16", 2, 8, True)],
)
def test_an_attention_without_a_fused_kernel_keeps_its_probabilities(dtype, heads, width, fused):
    made = {"dtype": getattr(torch, dtype), "requires_grad": True}
    query, key = torch.randn(2, 4, 16, width, **made), torch.randn(2, heads, 16, width, **made)
    saved, draws = [], {"dropout_p": 0.1} if fused else {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), id), MirroredDevice("cuda"):
        nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=heads < 4, **draws)
    assert ((2, 4, 16, 16) in saved) is not fused


def test_an_attention_with_dropout_keeps_no_mask_and_draws(cuda_autocast):
    def forward(m, x):
        heads = m[0](x).view(2, 16, 4, 8).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)

    model, x = Apply(forward, nn.Linear(32, 32)).to("meta"), torch.empty(2, 16, 32, device="meta")
    graph = gistkit.capture(model, (x,), backward=True)
    assert {(4, 16, 16), (2, 4, 16, 16)}.isdisjoint(s.shape for s in graph.kept())
    assert any(task.draws for task in graph.tasks)


def test_an_attention_of_fp32_keeps_its_mask_as_additions_for_all_heads():
    query, saved = torch.randn(2, 4, 16, 8, requires_grad=True), []
    keep = lambda t: saved.append((t.shape, t.dtype, t.untyped_storage().nbytes()))  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, id), MirroredDevice("cuda"):
        nn.functional.scaled_dot_product_attention(query, query, query, torch.ones(2, 1, 16, 16) > 0)
    assert ((2, 4, 16, 16), torch.float32, 2 * 16 * 16 * 4) in saved


@pytest.mark.parametrize(
    ("length", "by_rows", "kept"),
    [(16, True, [8 * 16 * 16 * 4]), (12, True, [8 * 12 * 16 * 4]), (16, False, [8 * 16 * 16 * 4, 8 * 16 * 16])],
)
def test_an_attention_whose_mask_needs_a_gradient_keeps_it_or_an_aligned_copy_or_has_no_kernel(length, by_rows, kept):
    """The mask, or its copy with rows of 16; by columns the probabilities, and the dropout's mask in bytes."""
    query = torch.randn(2, 4, length, 8, requires_grad=True)
    bias, saved = torch.randn(2, 4, length, length), []
    bias = (bias if by_rows else bias.mT.contiguous().mT).requires_grad_()
    keep = lambda t: saved.append((t.shape, t.untyped_storage().nbytes())) or t  # noqa: E731
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, MirroredDevice("cuda"):
        q, b = (mode.from_tensor(t) for t in (query, bias))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = nn.functional.scaled_dot_product_attention(q, q, q, b, dropout_p=0.1)
        out.sum().backward()
    assert [nbytes for shape, nbytes in saved if shape == (2, 4, length, length)] == kept
    assert out.shape == query.shape and b.grad.shape == bias.shape


def test_an_attentions_backward_on_a_gpu_holds_a_map_of_fp32_beside_its_results(cuda_autocast):
    def forward(m, x):
        return nn.functional.scaled_dot_product_attention(*(part(x).view(2, 1, 16, 32) for part in m))

    found = []
    for device in ("cpu", "meta"):
        model, x = (
            Apply(forward, *(nn.Linear(32, 32) for _ in range(3))).to(device),
            torch.empty(2, 16, 32, device=device),
        )
        graph = gistkit.capture(model, (x,), backward=True)
        found.append(
            {t.transient_bytes for t in graph.tasks if t.op.startswith("scaled_dot") and t.phase == "backward"}
        )
    assert found == [{0}, {2 * 16 * 32 * 4}]


def test_an_attention_of_three_dimensions_keeps_its_probabilities():
    query, bias, saved = torch.randn(2, 16, 8, requires_grad=True), torch.randn(16, 16, requires_grad=True), []
    keep = lambda t: saved.append(t.shape) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), MirroredDevice("cuda"):
        nn.functional.scaled_dot_product_attention(query, query, query, bias).sum().backward()
    assert (2, 16, 16) in saved


@pytest.mark.parametrize("inplace", [False, True])
def test_a_dropout_keeps_a_mask_of_bytes_but_in_place(cuda_autocast, inplace):
    model = Apply(lambda m, x: nn.functional.dropout(m[0](x), 0.1, inplace=inplace), nn.Linear(32, 32)).to("meta")
    graph = gistkit.capture(model, (torch.empty(16, 32, device="meta"),), backward=True)
    (dropout,) = (c for c in graph.calls if c.op == "dropout")
    assert [graph.storages[s.storage].dtype for s in dropout.saves] == ["bfloat16" if inplace else "bool"]


@pytest.mark.parametrize(
    ("shape", "dims", "nbytes"),
    [((16384, 768), [0], 96 << 20), ((16384, 3072), [0], 132 << 20), ((16, 1024, 768), [1], 96 << 20)],
)
def test_sums_of_a_gpu_hold_partial_results(shape, dims, nbytes):
    """As the biases' gradients of an SD3 on an H200 did; none where what is summed lies side by side."""
    x, op = torch.empty(shape, device="meta"), torch.ops.aten.sum.dim_IntList
    assert partial_bytes(op, (x, dims), x.sum(dims)) == nbytes
    last = [x.dim() - 1]
    assert partial_bytes(op, (x, last), x.sum(last)) == partial_bytes(torch.ops.aten.exp.default, (x,), x) == 0


def test_a_gather_on_a_gpu_sorts_its_places_in_backward_where_that_must_be_deterministic(cuda_autocast):
    model = Apply(lambda m, x: m[0](x).gather(0, x.long()), nn.Linear(32, 32)).to("meta")
    found = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        try:
            graph = gistkit.capture(model, (torch.empty(16, 32, device="meta"),), backward=True)
        finally:
            torch.use_deterministic_algorithms(False)
        found.append(max(t.transient_bytes for t in graph.tasks if t.op == "gather"))
    assert found[1] - found[0] == 48 * 16 * 32


@pytest.mark.parametrize(
    "shape, dim, sorted_", [((16, 1), 0, 16), ((16, 8), 0, 128), ((1, 16, 8), 1, 512), ((1, 16, 1), 1, 16)]
)
def test_places_that_are_expanded_in_all_dimensions_but_one_are_sorted_once(shape, dim, sorted_):
    """Measured on an H200: places expanded along the batch alone are sorted for each image."""
    places = torch.zeros(shape, dtype=torch.long).expand(*[4] * (len(shape) - 2), 16, 8)
    x = torch.zeros(places.shape)
    assert scratch_bytes(torch.ops.aten.scatter_add_.default, (x, dim, places, x), x) == 48 * sorted_


def test_a_softmaxs_backward_on_a_gpu_holds_the_gradient_times_the_probabilities(cuda_autocast):
    model = Apply(lambda m, x: m[0](x).softmax(-1), nn.Linear(32, 32)).to("meta")
    graph = gistkit.capture(model, (torch.empty(16, 32, device="meta"),), backward=True)
    found = [t.transient_bytes for t in graph.tasks if t.op == "softmax" and t.phase == "backward"]
    assert found[0] == 16 * 32 * 4, found  # the second one is autocast's cast


def test_a_linears_backward_on_a_gpu_holds_the_partial_results_of_its_biass_gradient(cuda_autocast):
    found = []
    for device, bias in (("cpu", True), ("meta", True), ("meta", False)):
        model, x = nn.Sequential(nn.Linear(32, 64, bias=bias).to(device)), torch.empty(4096, 32, device=device)
        graph = gistkit.capture(model, (x,), backward=True)
        found.append(max(t.transient_bytes for t in graph.tasks))
    assert found[0] == found[2] == 0 < found[1]
