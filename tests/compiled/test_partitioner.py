"""The whole partitioner on small networks, run without Inductor: bits of results, what is kept, symbolic sizes."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gistkit.compiled import Settings, compat, cut, partitioner, recompute, record
from gistkit.compiled.edit import early
from gistkit.compiled.forms import packing
from gistkit.compiled.memory import predicted_peak
from gistkit.compiled.partitioner import Moves
from gistkit.compiled.readers import reads_memory
from gistkit.compiled.split import value
from tests.support.compiled_cases import (
    Residual,
    Transformer,
    assert_same,
    backend_over,
    case,
    fresh_step,
    loss_of,
    plain_step,
    resnet,
    run_edited,
)

aten = torch.ops.aten
SETTINGS = Settings()


def amp_loss(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, x, y)


def run(loss, model, batches, settings, dynamic=False):
    """(results of each batch, records of the graphs); plainly where settings is None."""
    torch._dynamo.reset()
    partition = None if settings is None else lambda *args, **words: cut(*args, settings, **words)
    with record.collected() as found:
        forward = torch.compile(loss, backend=backend_over(partition), fullgraph=True, dynamic=dynamic)
        return [fresh_step(model, x, y, forward) for x, y in batches], found


@pytest.mark.parametrize(("name", "loss"), [("vgg", loss_of), ("resnet", amp_loss), ("block", loss_of)])
def test_same_bits_and_fewer_bytes(name, loss):
    model, x, y = case(name)
    plain, _ = run(loss, model, [(x, y)], None)
    ours, (graph,) = run(loss, model, [(x, y)], SETTINGS)
    assert_same(plain[0], ours[0])
    assert graph.kept_bytes < graph.plain_bytes
    packed = {"vgg": {"mask1", "map4"}, "resnet": {"map4"}, "block": {"rebuild"}}[name]
    assert {row.form for row in graph.rows} >= packed | {"dense"}
    plainly = [row for row in graph.rows if row.plain_bytes]
    assert all(row.reason and row.kept_bytes <= row.plain_bytes for row in plainly)
    bits = {"bool": 8, "bfloat16": 16, "float32": 32}  # of floats the signs are kept
    assert all(row.kept_bytes * bits[row.dtype] == row.plain_bytes for row in plainly if row.form == "mask1")
    assert all(row.kept_bytes * 2 == row.plain_bytes for row in plainly if row.form == "map4")


def test_a_kept_view_has_the_reason_of_its_base(monkeypatch):
    monkeypatch.setitem(partitioner.SHARES, "bitwise", (0.0,))
    model, x, y = case("block", rows=32)
    _, (graph,) = run(loss_of, model, [(x, y)], SETTINGS)
    why = [row.reason for row in graph.rows if row.op == "view" and row.form == "dense"]
    assert any("computing it anew would take" in reason for reason in why)


def test_sizes_that_change_from_call_to_call():
    model, x, y = case("stage", rows=12)
    batches = [(x, y), (x[:6], y[:6])]
    plain = [run(loss_of, model, [batch], None)[0][0] for batch in batches]
    ours, records = run(loss_of, model, batches, SETTINGS, dynamic=True)
    assert len(records) == 1  # one graph for both batches
    assert {"mask1", "map4"} <= {row.form for row in records[0].rows}
    for some, others in zip(plain, ours, strict=True):
        assert_same(some, others)


def test_lossy_forms_round_activations_alone():
    (model, x, y), plain = case("vgg", rows=32), plain_step("vgg", 32)
    ours, (graph,) = run(loss_of, model, [(x, y)], Settings(lossy="fp8s"))
    assert torch.equal(plain[0], ours[0][0])  # forward has exact values
    errors = [((a - b).norm() / a.norm()).item() for a, b in zip(plain[1:], ours[0][1:], strict=True)]
    assert 0 < max(errors) < 0.06  # fp8 has 3 bits of mantissa: an error of at most 2**-4 an element
    narrow = [row for row in graph.rows if row.form == "fp8s"]
    assert narrow and all(row.kept_bytes == row.plain_bytes // 4 * 129 // 128 for row in narrow)
    assert graph.kept_bytes * 3 < graph.plain_bytes
    exact = {row.reason for row in graph.rows if row.form == "dense"}
    assert "fewer than 4096 elements" in exact


@pytest.mark.parametrize("left", [False, True])
def test_of_one_products_queries_keys_and_values_all_are_rounded_or_none(monkeypatch, left):
    model, x, y = case("block", rows=32)
    exact, first = packing.stays_exact, (32, 4, 16, 8)
    attention = "_scaled_dot_product"

    def keys_stay(pair, node, rounding):
        read = [user for user in pair.place(node).users if attention in str(user.target)]
        keys = read and compat.operands(read[0])["key"] is pair.place(node)
        return "a key" if left and keys else exact(pair, node, rounding)

    monkeypatch.setattr(packing, "stays_exact", keys_stay)
    plain = plain_step("block", 32)
    ours, (graph,) = run(loss_of, model, [(x, y)], Settings(lossy="fp8s"))
    rows = [row for row in graph.rows if row.shape == first and attention not in row.op]
    if left:
        assert {(row.form, row.reason) for row in rows} == {("dense", "several saved tensors are on this storage")}
        return
    size = 4 * math.prod(first)
    assert [row.form for row in rows] == ["fp8s"] * 3 and all(row.kept_bytes == size // 4 * 129 // 128 for row in rows)
    assert sorted(row.plain_bytes for row in rows) == [0, 0, 3 * size]
    assert not any("rebuild" in row.reason for row in rows)
    errors = [((a - b).norm() / a.norm()).item() for a, b in zip(plain[1:], ours[0][1:], strict=True)]
    assert 0 < max(errors) < 0.06  # an element's is at most 2**-4

    pair = moved(Settings(lossy="fp8s"), model, x, y)
    decoded = pair.backward.graph.find_nodes(op="call_function", target=torch.ops.gistkit.materialised.default)
    found = [value(node) for node in decoded if value(node).shape == first]
    assert len(found) >= 3 and all(v.untyped_storage().nbytes() == size for v in found)  # without the gaps of the parts


def test_the_places_of_a_grid_sample_are_not_rounded():
    """Neighbours of a rounded place are others: gradients had nothing to do with plain's."""

    class Samples(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Linear(2, 2)

        def forward(self, x, y):
            grid = self.places(y).view(2, 64, 64, 2).tanh()
            return F.grid_sample(x.sin(), grid, align_corners=False).square().mean()

    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 16, 16), torch.rand(8192, 2)
    _, (graph,) = run(lambda m, x, y: m(x, y), Samples(), [(x, y)], Settings(lossy="fp8s"))
    assert {row.form for row in graph.rows if "grid_sample" in row.reason} == {"dense"}


@pytest.mark.parametrize("narrow", [False, True])
def test_logits_stay_exact_and_short_rows_of_norms_are_bf16(narrow):
    """Under a budget, which asks for bytes before time, the rows are fp8s as well."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 300))
    x, y = torch.randn(512, 32), torch.randint(300, (512,))
    forms = {}
    for budget in (None, "96%"):
        settings = Settings(lossy="fp8s", budget=budget)
        _, (graph,) = run(amp_loss if narrow else loss_of, model, [(x, y)], settings)
        forms[budget] = {row.form for row in graph.rows}
        assert "backward exponentiates it" in {row.reason for row in graph.rows if row.shape == (512, 300)}
    assert ("bf16" in forms[None]) == (not narrow) and "bf16" not in forms["96%"]
    _, (graph,) = run(loss_of, model, [(x, y)], Settings(lossy="fp16s"))
    assert "bf16" not in {row.form for row in graph.rows}  # nothing is rounded further than asked for


def test_forward_writes_what_a_library_reads_though_it_is_not_saved():
    """Else Inductor may compute it twice, as a softmax for its statistics and for the product behind it."""
    model, x, y = case("block", rows=32)
    found = []

    def partition(*args, **words):
        pair = cut(*args, Settings(fidelity="reassociated"), **words)
        written = pair[0].graph.find_nodes(op="call_function", target=torch.ops.gistkit.written.default)
        saved = set(pair[0].graph.output_node().all_input_nodes)
        found.extend((any(map(reads_memory, node.users)), node.args[0] in saved) for node in written)
        return pair

    torch._dynamo.reset()
    fresh_step(model, x, y, torch.compile(loss_of, backend=backend_over(partition), fullgraph=True))
    assert set(found) == {(True, False)}


def test_a_budget_takes_as_few_moves_as_it_needs(monkeypatch):
    model, x, y = case("block", rows=32)
    kept = {}
    for share in ("100%", "94%"):
        ours, (graph,) = run(loss_of, model, [(x, y)], Settings(budget=share))
        assert_same(plain_step("block", 32), ours[0])
        assert "predicted peak" in graph.notes[0]
        kept[share] = graph.kept_bytes
    assert kept["94%"] < kept["100%"] == graph.plain_bytes
    text, looks = "BudgetError: the budget must be at least", []
    monkeypatch.setattr(Moves, "peak", lambda self, own=Moves.peak: looks.append(self) or own(self))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=text) as failed:
        run(loss_of, model, [(x, y)], Settings(budget=1000))
    assert set(failed.value.inner_exception.least_bytes) == {"bitwise"}
    assert len(looks) == 2  # before the first move and behind the last: what is kept is more than the budget all along
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="name bytes for a model with graph breaks"):
        run(loss_of, model, [(x, y)], Settings(budget="1%"))


@pytest.mark.parametrize(
    ("words", "share", "error"),
    [({"fidelity": "reassociated"}, 0.7, 0.0), ({"lossy": "fp8s"}, 0.6, 0.06)],  # fp8: at most 2**-4 an element
)
def test_segments_run_again_where_no_move_meets_the_budget(words, share, error):
    torch.manual_seed(0)
    model, x, y = Transformer(64, 2), torch.randn(32, 3, 16, 16), torch.arange(32) % 10
    plain, _ = run(amp_loss, model, [(x, y)], None)
    _, (moved,) = run(amp_loss, model, [(x, y)], Settings(**words))
    ours, (graph,) = run(amp_loss, model, [(x, y)], Settings(budget=f"{share:.0%}", **words))
    assert moved.peak_bytes > share * moved.plain_peak_bytes >= graph.peak_bytes
    assert graph.plain_peak_bytes == moved.plain_peak_bytes and graph.plain_bytes == moved.plain_bytes
    assert "recompute" in {row.form for row in graph.rows} and "segments of forward again" in graph.notes[-2]
    for a, b in zip(plain[0], ours[0], strict=True):
        assert (a - b).norm() <= error * b.norm()
    if "lossy" in words:  # what a segment begins with stays as it is: rounded, all of the segment would be off
        _, (wider,) = run(
            amp_loss, model, [(x, y)], Settings(budget="70%", **words)
        )  # queries, keys, values are rounded
        assert "recompute" not in {row.form for row in wider.rows}
        assert "backward runs a segment again from it" in {row.reason for row in graph.rows if row.form == "dense"}
    else:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match='or fidelity="reassociated"'):
            run(amp_loss, model, [(x, y)], Settings(budget=f"{share:.0%}"))


def test_segments_run_again_beside_draws_and_symbolic_sizes_but_not_beside_the_callers_checkpoints():
    torch.manual_seed(0)
    model, settings = nn.Sequential(*(Layer() for _ in range(5))), Settings(fidelity="reassociated", budget="60%")
    batches = [(torch.randn(rows, 64), torch.arange(rows)) for rows in (512, 640)]
    plain, _ = run(drawn, model, batches, None, dynamic=True)
    ours, (graph,) = run(drawn, model, batches, settings, dynamic=True)
    for a, b in zip(plain, ours, strict=True):
        assert_same(a, b)
    assert "segments of forward again" in graph.notes[-2]
    found = []

    def edit(pair):
        found.append(recompute.divisions(pair, Moves(pair, settings).rows()))

    for inner in (model[2].inner, partial(checkpoint, model[2].inner, use_reentrant=False)):
        model[2].inner = inner
        run_edited(edit, model, batches[0][0], batches[0][1] % 64)
    assert found[0] and not found[1]


def test_a_gradient_is_written_before_a_segment_runs_again():
    """The sum of a residual block's gradients is: fused with the norm's gradients behind the convolutions that run
    again, its addends would be there meanwhile."""
    torch.manual_seed(0)
    model, x, y = resnet(*(Residual(8, 8) for _ in range(4))), torch.randn(32, 3, 16, 16), torch.arange(32) % 10
    settings, found = Settings(fidelity="reassociated", budget="50%"), []

    def edit(pair):
        rows = Moves(recompute.rerun(pair, ()), settings).rows()
        for division in recompute.divisions(pair, rows):
            nodes = list(recompute.rerun(pair, division).backward.graph.nodes)
            written = [i for i, n in enumerate(nodes) if n.target is torch.ops.gistkit.materialised.default]
            runs = [i for i, n in enumerate(nodes) if n.target is aten.convolution.default]
            # of two segments the last block runs again alone, whose incoming gradient is no sum
            found.append((bool(written) == (len(division) != 2), all(any(i < j for j in runs) for i in written)))
            sums = [nodes[i].args[0] for i in written]
            assert all(n.target is not torch.ops.prims.convert_element_type.default for n in sums)

    run_edited(edit, model, x, y)
    assert found and all(expected and before for expected, before in found)


def test_a_gradient_that_takes_more_than_what_it_is_made_of_is_not_written():
    """Under autocast a norm's gradient begins as the incoming one, of half the bytes, cast to fp32."""
    torch.manual_seed(0)
    found = []

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(64), nn.Linear(64, 64, bias=False)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return x + F.silu(self.linear(self.norm(x)))

    def edit(pair):
        rows = Moves(recompute.rerun(pair, ()), SETTINGS).rows()
        for division in recompute.divisions(pair, rows):
            graph = recompute.rerun(pair, division).backward.graph
            written = graph.find_nodes(op="call_function", target=torch.ops.gistkit.materialised.default)
            casts = [n.args[0] for n in written if n.args[0].target is torch.ops.prims.convert_element_type.default]
            found.extend(value(n).dtype for n in casts)

    run_edited(edit, nn.Sequential(*(Normed() for _ in range(3))), torch.randn(512, 64), torch.arange(512) % 64)
    assert set(found) == {torch.bfloat16}  # sums of gradients in fp32, rounded


def test_what_reads_a_buffer_that_forward_overwrites_does_not_run_again():
    """Backward would read the buffer's new value."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mix", torch.randn(64, 64) / 8)
            self.bias = nn.Parameter(torch.zeros(64))

        def forward(self, x):
            mixed = x @ self.mix
            self.mix.mul_(0.5)
            return F.gelu(mixed + self.bias + torch.tensor([0.25, 0.5]).repeat(32))

    torch.manual_seed(0)
    model = nn.Sequential(Mixed(), *(Layer(0.0) for _ in range(5)), nn.Linear(64, 10))
    x, y = torch.randn(512, 64), torch.arange(512) % 10
    plain, _ = run(loss_of, model, [(x, y)], None)
    ours, (graph,) = run(loss_of, model, [(x, y)], Settings(fidelity="reassociated", budget="45%"))
    assert "segments of forward again" in graph.notes[-2]
    assert next(row.form for row in graph.rows if row.op == "mm") == "dense"
    for a, b in zip(plain[0], ours[0], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("patch", "again"), [(16, False), (4, True)])
def test_patches_of_images_stay_where_they_take_long_for_their_bytes(monkeypatch, patch, again):
    """A patch of 16 takes 1,536 operations an element, one of 4 takes 96."""
    width, found = 64 * (32 // patch) ** 2, []
    model = nn.Sequential(nn.Conv2d(3, 64, patch, patch), nn.Flatten(), nn.Linear(width, 64), nn.Linear(64, 10))
    monkeypatch.setattr(recompute, "divided", found.extend)

    def edit(pair):
        recompute.divisions(pair, Moves(pair, SETTINGS).rows())

    run_edited(edit, model, torch.randn(256, 3, 32, 32), torch.arange(256) % 10)
    times = {operator.name: operator.time_s for operator in found}
    assert (times["convolution"] is not None) == again and times["addmm"]


class Layer(nn.Module):
    """Two products with a dropout between, and a norm."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.dropout = dropout

    def inner(self, x):
        return self.down(F.dropout(F.gelu(self.up(self.norm(x))), self.dropout))

    def forward(self, x):
        return x + self.inner(x)


def drawn(model, x, y):
    return F.cross_entropy(model(x), y % 64)


def test_the_predicted_peak_is_the_same_before_and_after_finishing():
    model, x, y = case("resnet", rows=32)
    found = []

    def edit(pair):
        moves = Moves(pair, SETTINGS)
        plain = predicted_peak(pair)
        moves.all()
        found.append((plain, predicted_peak(pair)))
        pair.finish()
        found.append((plain, predicted_peak(pair)))

    run_edited(edit, model, x, y)
    assert found[0] == found[1] and found[0][1] < found[0][0]


class Gate(nn.Module):
    """Images scaled by what is ready long before: a mask of the product is kept."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        h = F.relu(self.first(x))
        gate = 1 + h.detach().mean((0, 2, 3), keepdim=True)
        return self.head(F.hardtanh(self.second(h) * gate).mean((2, 3)))


def test_early_moves_nothing_that_forward_reads():
    """Moved, it would be fused with other kernels, whose sums have another order on a CPU too."""
    orders = []

    def edit(pair):
        nodes, read = list(pair.forward.graph.nodes), set(pair.outputs[:1])
        for node in reversed(nodes):
            read |= set(node.all_input_nodes) if node in read else set()
        before = [node for node in nodes if node in read]
        early(pair)
        after = list(pair.forward.graph.nodes)
        orders.append((before, [node for node in after if node in read], nodes, after))

    _, x, y = case("conv")
    run_edited(edit, Gate(), x, y)
    before, after, nodes, moved = orders[0]
    assert before == after and nodes != moved


class Redrawn(nn.Module):
    """A checkpoint with dropout: backward gets the generator's state under a name of its own."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(768, 64), nn.Linear(64, 10)

    def part(self, h):
        return F.dropout(F.relu(self.body(h)), 0.3)

    def forward(self, x):
        h = checkpoint(self.part, x.flatten(1), use_reentrant=False)
        return self.head(h + checkpoint(self.part, x.flatten(1).sin(), use_reentrant=False))


@pytest.mark.parametrize("settings", [SETTINGS, Settings(fidelity="reassociated"), Settings(lossy="fp8s")])
def test_a_checkpoint_that_draws_random_numbers(settings):
    _, x, y = case("conv")
    model = Redrawn()
    plain, _ = run(loss_of, model, [(x, y)], None)
    ours, _ = run(loss_of, model, [(x, y)], settings)
    compared = slice(None) if settings.lossy is None else slice(1)  # fp8 rounds what the weights' gradients read
    assert_same(plain[0][compared], ours[0][compared])


class Dense(nn.Module):
    """Two layers of a DenseNet's block."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (8, 16))
        self.convs = nn.ModuleList(nn.Conv2d(n, 8, 3, padding=1) for n in (8, 16))
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(24, 10)

    def forward(self, x):
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat((x, conv(F.relu(norm(x)))), 1)
        return self.head(x.mean((2, 3)))


def moved(settings, model, x, y):
    """The pair after all moves."""
    found = []

    def edit(pair):
        moves = Moves(pair, settings)
        moves.all()
        moves.finish()
        found.append(pair)

    run_edited(edit, model, x, y)
    return found[0]


def test_a_concatenation_that_is_rebuilt_is_still_written_once_in_forward():
    """Else Inductor computes it within each reader: a batch norm's statistics took ten times as long (H100)."""
    _, x, y = case("conv")
    pair = moved(Settings(fidelity="reassociated"), Dense(), x, y)
    cats = pair.forward.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert [node for node in pair.saved if node in cats] == []
    (first,) = (node for node in cats if value(node).shape[1] == 16)
    assert [user.target for user in first.users] == [torch.ops.gistkit.written.default]


def test_a_lookup_that_is_rebuilt_is_still_written_in_forward():
    """Else Inductor looks it up within the norm that reads it, and a CPU sums that in another order: under autocast 3
    of the 32 tensors of a small language model had torch.compile's bits."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.norm, self.out = nn.Embedding(97, 64), nn.LayerNorm(64), nn.Linear(64, 10)

        def forward(self, x):
            return self.out(self.norm(self.table(x))).mean(1)

    pair = moved(Settings(), Tokens(), torch.randint(97, (64, 32)), torch.randint(10, (64,)))
    (found,) = pair.forward.graph.find_nodes(op="call_function", target=aten.embedding.default)
    assert found not in pair.saved
    assert [user.target for user in found.users] == [torch.ops.gistkit.written.default]


def test_an_attentions_mask_is_not_rounded():
    """Its infinities take the scale of a block: gradients of a small Llama were off by half under fp8s."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.out = nn.Linear(32, 32), nn.Linear(32, 10)

        def forward(self, x):
            h = self.inside(x).unflatten(-1, (2, 16)).transpose(1, 2)
            seen = (x[..., 0] > 0)[:, None, None, :] | torch.eye(64, dtype=torch.bool)
            h = F.scaled_dot_product_attention(h, h, h, attn_mask=seen)
            return self.out(h.transpose(1, 2).flatten(2)).mean(1)

    pair = moved(Settings(lossy="fp8s"), Masked(), torch.randn(8, 64, 32), torch.randint(10, (8,)))
    masks = [node for node in pair.saved if node.target is aten.where.self]
    assert masks and pair.place(masks[0]).users


def test_masks_are_decoded_in_the_layout_that_inductor_gives_to_images(monkeypatch):
    """A mask of another layout has the masked gradient copied for the convolution that reads it."""
    monkeypatch.setattr(compat, "prefers_channels_last", lambda graph: True)
    model, x, y = case("vgg")
    pair = moved(Settings(fidelity="reassociated"), model, x, y)
    masks = [
        n for n in pair.backward.graph.find_nodes(op="call_function", target=aten.ne.Scalar) if value(n).dim() == 4
    ]
    assert masks and all(value(n).is_contiguous(memory_format=torch.channels_last) for n in masks)


class Selective(nn.Module):
    """Convolutions of an activation's halves, as a selective kernel's paths, beside one of the whole."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = Residual(3, 8), nn.Linear(8, 10)
        self.paths = nn.ModuleList(nn.Conv2d(4, 8, 3, padding=d, dilation=d) for d in (1, 2))
        self.norm, self.down = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = self.stem(x)
        halves = torch.split(x, 4, 1)
        paths = sum(path(half) for path, half in zip(self.paths, halves, strict=True))
        return self.head(F.relu(self.norm(paths) + self.down(x)).mean((2, 3)))


def test_an_activation_whose_parts_are_read_is_rebuilt():
    _, x, y = case("conv")
    pair = moved(Settings(fidelity="reassociated"), Selective(), x, y)
    assert not [node for node in pair.saved if node.target in (aten.relu.default, aten.split.Tensor)]
