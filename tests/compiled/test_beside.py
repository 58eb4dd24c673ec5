"""What PyTorch itself has beside gistkit in a compiled model: checkpoints, its memory budget, modes, equal blocks."""

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import gistkit
from gistkit.errors import CompressError
from tests.support.compiled_cases import assert_same, graphs_run_as_they_are, step

pytestmark = pytest.mark.usefixtures("fresh")
WIDTH = 64
X = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))
# PyTorch's own, of a compiled part whose input is another part's output
between_parts = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Block(nn.Module):
    """A residual block; checkpointed where asked."""

    def __init__(self, recomputed=False):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recomputed = recomputed

    def forward(self, x):
        hidden = checkpoint(self.up, x, use_reentrant=False) if self.recomputed else self.up(x)
        return x + self.down(F.gelu(hidden))


def network(*recomputed):
    torch.manual_seed(2)
    return nn.Sequential(*map(Block, recomputed))


def loss_of(model, x, _):
    return model(x).square().mean()


@pytest.fixture
def no_code():
    with graphs_run_as_they_are():
        yield


def compare(model, **words):
    """Equal bits under torch.compile and gistkit.compile; the report."""
    plain = step(torch.compile(model, **words), X, None, loss_of)
    assert_same(plain, step(gistkit.compile(model, **words), X, None, loss_of))
    report = gistkit.report(model)
    assert len(report.graphs) == 1
    return report


@pytest.mark.usefixtures("no_code")
def test_a_checkpoint_inside():
    report = compare(network(True)[0])
    assert 0 < report.kept_bytes <= report.plain_bytes


@pytest.mark.usefixtures("no_code")
def test_activation_memory_budget_set_beside():
    """PyTorch cuts by its budget; gistkit makes its moves on that cut."""
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        report = compare(network(False)[0])
    assert 0 < report.kept_bytes <= report.plain_bytes


def test_max_autotune():
    report = compare(network(False)[0], mode="max-autotune")
    assert report.kept_bytes < report.plain_bytes


@between_parts
@pytest.mark.usefixtures("no_code")
def test_equal_blocks_compiled_one_by_one_share_their_graphs():
    """As under torch.compile, which would give up at recompile_limit otherwise and run the rest eagerly."""
    blocks = network(*[False] * 4)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        step(nn.Sequential(*map(gistkit.compile, blocks)), X, None, loss_of)
    assert counters["stats"]["unique_graphs"] == 2  # the first block's input takes no gradient
    reports = [gistkit.report(block) for block in blocks]
    assert all(0 < report.kept_bytes < report.plain_bytes for report in reports)


@between_parts
@pytest.mark.usefixtures("no_code")
def test_compressed_blocks_compiled_one_by_one_have_whole_graphs():
    blocks = network(False, False, False)
    compiled = nn.Sequential(*(torch.compile(gistkit.compress(b), fullgraph=True) for b in blocks))
    step(compiled, X, None, loss_of)
    assert [len(gistkit.report(block).graphs) for block in compiled] == [1, 1, 1]
    with pytest.raises(CompressError, match="3 compressed parts; report each"):
        gistkit.report(compiled)
