"""The papers' tables: rows, their page, and what the small networks' rows are made from."""

import json
import os
from dataclasses import replace

import pytest
import torch

from bench.papers import cdma, gist, modnn, page
from bench.papers.baselines import gradient_maps, most_at_once, network_wide
from bench.papers.common import AT_LEAST, AT_MOST, IMPLIED, PAPERS, ROOT, Row, Sheet, path_of, read, write
from bench.papers.gist_cases import ENCODINGS, INPLACE
from bench.papers.gist_cases import Case as Encoded
from bench.papers.gist_deep import largest_batch
from bench.papers.library_view import library_view
from bench.papers.networks import Captures, alexnet_2012, overfeat_accurate, vgg101_early
from bench.papers.vdnn_cases import Case as Managed
from gistkit.planning.policies.gist_rules import BINARIZE, DPR, SSDC
from tests.support.step_graphs import chain

SHEET = Sheet("vdnn", "titanx", "abc", "2026-01-01")


@pytest.fixture(scope="module")
def captures():
    return Captures()


@pytest.fixture(scope="module")
def managed(captures):
    return Managed.of(captures.zoo("alexnet", 128), "titanx")


@pytest.fixture(scope="module")
def encoded(captures):
    return {n: Encoded(captures.zoo(n, 64, inplace=False), "titanx", 0.353) for n in ("alexnet", "vgg16")}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_is_whole_and_every_difference_has_a_reason(paper):
    rows = read(path_of(paper))
    assert rows and {r.paper for r in rows} == {paper}
    for row in rows:
        assert row.section and row.network and row.metric and row.commit and row.date
        assert row.hardware in ("titanx", "k40m")
        assert row.ratio == pytest.approx(row.our_value / row.paper_value, abs=5e-4)
        assert row.agrees or row.note, row
    numbers = [(r.network, r.batch, r.metric) for r in rows]
    assert len(set(numbers)) == len(numbers)


def test_the_page_is_made_from_the_rows():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(page.all_rows())
    for paper in PAPERS:
        assert 0 < (page.PLOTS / f"papers-{paper}.png").stat().st_size < 150_000
        assert os.access(ROOT / "scripts" / f"table_{paper}", os.X_OK)


def test_a_page_says_ticks_dashes_and_each_note_once():
    rows = [
        SHEET.row("I", "a", 1, "x", 10, 10.5, "GB"),
        SHEET.row("I", "b", 1, "x", 10, 20, "GB", note="because"),
        SHEET.row("I", "b", 2, "x", 10, 20, "GB", note="because"),
        SHEET.row("I", "c", 0, "x", 10, 10, "%", relation=IMPLIED, density="0.5"),
    ]
    text = page.page(rows)
    assert "| [vDNN](#vdnn) | titanx | 4 | 1 | 1 | 2026-01-01, abc |" in text
    assert "| ✓ | I | a (1) | x | 10 GB | 10.5 GB |  |" in text
    assert "|  | I | b (2) | x | 10 GB | 20 GB | 1 |" in text
    assert "| – | I | c | x | 10 % | 10 % | 2 |" in text
    assert text.count("because") + text.count("Because") == 1 and "2. Density 0.5." in text


@pytest.mark.parametrize(
    ("relation", "ours", "agrees"),
    [
        *(("=", 10.99, True), ("=", 11.2, False), ("=", 8.9, False), (AT_LEAST, 30, True), (AT_LEAST, 8.9, False)),
        *((AT_MOST, 1, True), (AT_MOST, 10.9, True), (AT_MOST, 11.2, False)),
    ],
)
def test_what_agrees(relation, ours, agrees):
    assert SHEET.row("I", "a", 1, "x", 10, ours, relation=relation).agrees is agrees


def test_a_difference_without_a_reason_is_not_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    bad = SHEET.row("V-A", "AlexNet", 128, "memory", 10, 20)
    with pytest.raises(ValueError, match=r"row vdnn V-A, AlexNet, memory: 20.0 against the paper's 10 needs a note"):
        write([bad], path)
    assert not path.exists()
    write([replace(bad, note="why")], path)
    assert read(path) == [replace(bad, note="why")]
    path.write_text(json.dumps({"paper": "vdnn"}) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: expected the fields"):
        read(path)


def recorded(paper, network, metric):
    return next(r.our_value for r in read(path_of(paper)) if (r.network, r.metric) == (network, metric))


def test_the_losss_own_gradient_is_no_gradient_map(managed):
    """vDNN, Fig. 2: a network without branches needs one dX and one dY, each as large as the largest."""
    graph = managed.graph
    gradients = [b for b in graph.blocks if b.kind == "gradient"]
    assert most_at_once(gradients) == 3 and most_at_once(gradient_maps(graph)) == 2
    largest = 128 * 64 * 55 * 55 * 4
    assert network_wide(graph, managed.costs).gradient_map_bytes == 2 * largest
    plain = library_view(chain(layers=2))  # its backward starts at the last layer: nothing to leave out
    assert gradient_maps(plain) == [b for b in plain.blocks if b.kind == "gradient"]


def test_what_is_said_of_pytorchs_converter_was_measured():
    """The note on Gist's Fig. 9 quotes rows of 512 MiB, FP32, half of them zeros."""
    lines = (ROOT / "bench" / "results" / "2026-11-20-h200-layers.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    of = {
        (r["case"], r["direction"]): r["median_s"]
        for r in rows
        if (r["dtype"], r["size_mib"], r["density"]) == ("float32", 512.0, 0.5)
    }
    encode, decode = (of["torch to_sparse_csr (int64)", d] / of["csr", d] for d in ("encode", "decode"))
    assert (
        f"{encode:.1f} times as long to encode" in gist.CONVERTER and f"{decode:.0f} times to decode" in gist.CONVERTER
    )


def test_overfeats_accurate_model_has_its_144_million_parameters():
    with torch.device("meta"):
        model = overfeat_accurate()
        assert model(torch.empty(1, 3, 221, 221)).shape == (1, 1000)
    assert sum(p.numel() for p in model.parameters()) // 10**6 == 144


def test_convolutions_take_more_of_the_time_under_memory_optimal_algorithms(managed):
    fast = {t.index: min(a.seconds for a in managed.costs.algorithms[t.index]) for t in managed.graph.tasks}
    features = [la for la in managed.layers if la.features]
    convs, every = (sum(fast[t] for la in some for t in la.tasks) for some in (
        [la for la in features if la.kind == "CONV"], features))  # fmt: skip
    assert managed.conv_share() == pytest.approx(convs / every)
    assert managed.conv_share("m") > managed.conv_share("p")


def test_vdnns_accounting_leaves_weight_gradients_out(managed):
    everything = network_wide(managed.graph, managed.costs).total_bytes
    weights = sum(b.nbytes for b in managed.graph.blocks if b.kind == "weight_gradient")
    assert managed.baseline_bytes("m") == everything - weights - _default_workspace(managed)
    assert managed.baseline_bytes("p") / 1e9 == pytest.approx(recorded("vdnn", "AlexNet", "baseline (p)"), rel=1e-3)
    features = managed.baseline_bytes("m", managed=True)
    classifier = 4 * (4096 * 9216 + 4096 + 4096 * 4096 + 4096 + 1000 * 4096 + 1000)
    assert managed.baseline_bytes("m") - features == pytest.approx(classifier, rel=0.06)  # and its small maps


def _default_workspace(case):
    return max(case.costs.workspace_bytes(t.index) for t in case.graph.tasks)


def test_vdnns_savings_are_of_the_managed_part(managed):
    most, average = managed.saved("all(m)")
    assert 0 < most < average < 1
    assert 100 * average == pytest.approx(
        recorded("vdnn", "AlexNet", "all(m): reduction of the average memory"), rel=1e-3
    )
    assert managed.saved("all(p)")[0] < managed.saved("all(p)", workspace=False)[0]
    assert managed.saved_of_all("all(m)")[1] < average  # nothing of the classifier goes
    assert managed.loss("all(m)") > managed.loss("all(p)") > managed.loss("dyn") >= -1e-9
    assert managed.on_host("dyn") == 0.0 < managed.on_host("all(m)") < 1


def test_gists_breakdown_of_vgg16(encoded):
    """Fig. 1: 83 % of VGG16's memory are maps."""
    assert round(100 * encoded["vgg16"].map_share) == 83


def test_gists_encodings_on_alexnet(encoded):
    case = encoded["alexnet"]
    base = case.baseline
    assert base.dynamic < base.static < base.investigation
    halves, quarters = (base.stashed / case.encoded((DPR,), f).stashed for f in ("fp16", "fp8"))
    assert halves == pytest.approx(2, rel=0.01) and quarters == pytest.approx(4, rel=0.02)  # dropout masks stay
    steps = [case.encoded(e).investigation for e in ((SSDC,), (BINARIZE,), (SSDC, BINARIZE))]
    assert base.investigation > steps[0] > steps[1] > steps[2]
    assert case.encoded((SSDC, BINARIZE, INPLACE), both_ways=True).immediate < case.gist().immediate
    ours = base.static / case.gist("fp8").static
    assert ours == pytest.approx(recorded("gist", "AlexNet", "lossless, DPR (FP8): MFR"), rel=1e-3)


def test_gists_overhead_is_what_decoding_once_adds(encoded):
    case = encoded["vgg16"]
    rounded = [case.overhead((DPR,), f) for f in ("fp8", "fp10", "fp16")]
    sparse = case.overhead((SSDC,))
    assert case.overhead((BINARIZE,)) < 0 < rounded[0] < rounded[1] < rounded[2]
    # CSR takes 4.2 passes a map at this density where fp8 takes 2.5, but it encodes fewer maps.
    assert rounded[0] < sparse < rounded[1]
    assert case.overhead(ENCODINGS) < sparse


def test_the_largest_batch_grows_as_maps_shrink():
    assert largest_batch(1024 * 100, 1000, 11_000) == 100  # 100 bytes an image beside 1000
    assert largest_batch(1024 * 50, 1000, 11_000) == 200


@pytest.mark.parametrize("order", ("norm, pool", "pool, norm"))
def test_alexnet_of_2012_stashes_more(captures, encoded, order):
    graph = captures.of(lambda: alexnet_2012(order), order, 64, inplace=False)
    assert Encoded(graph, "titanx", 0.353).baseline.stashed > encoded["alexnet"].baseline.stashed


def test_vgg101_with_early_layers_has_modnns_bound(captures):
    case = modnn.Case.of(captures.of(vgg101_early, "vgg101", 128), "k40m")
    assert sum(task.conv is not None for task in case.graph.tasks if task.phase == "forward") == 16 + 82
    assert round(case.bound_bytes / 1e9, 1) == 1.4
    assert case.ideal_bytes / 1e9 == pytest.approx(100, rel=0.05)


def test_points_at_which_modnn_is_behind():
    point = modnn.AtBudget("a", 4, 2.0, None, 1.6)
    assert point.behind == pytest.approx(0.25)
    assert replace(point, modnn_s=1.5).behind == 0
    assert replace(point, plus_s=None).behind == 0


def test_cdma_on_alexnet(captures):
    found = cdma.compare(captures.zoo("alexnet", 128), "titanx", cdma.DENSITY)
    assert found.ratio == pytest.approx(2.6, rel=1e-3)
    assert found.plain_s < found.engine_s < found.kernels_s < found.vdnn_s


def test_the_fields_of_a_row():
    names = {"paper", "section", "network", "batch", "hardware", "metric", "paper_value", "our_value", "ratio"}
    assert names | {"note", "commit", "date"} <= set(Row.__dataclass_fields__)


@pytest.mark.parametrize(
    ("ratios", "ticks"),
    [
        ((0.95, 1.1), [0.8, 0.9, 1, 1.1, 1.25]),
        ((0.61, 1.4), [0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5]),
        ((0.059, 4.9), [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5]),
    ],
)
def test_every_dot_of_a_plot_lies_between_two_ticks(ratios, ticks):
    assert page.ratio_ticks(ratios) == ticks


def test_the_plots_of_the_rows_have_ticks_on_both_sides():
    for paper in PAPERS:
        ratios = [r.ratio for r in page.all_rows() if r.paper == paper and r.ratio > 0]
        ticks = page.ratio_ticks(ratios)
        assert ticks[0] <= min(ratios) and max(ratios) <= ticks[-1] and len(ticks) >= 5
