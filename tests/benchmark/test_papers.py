"""The papers' tables: rows, their page, and what the small networks' rows are made from."""

import json
import os
from dataclasses import replace

import pytest

from bench.papers import cdma, gist, measured, modnn, page
from bench.papers.baselines import gradient_maps, most_at_once, network_wide
from bench.papers.common import AT_LEAST, AT_MOST, IMPLIED, PAPERS, ROOT, Sheet, path_of, read, write
from bench.papers.gist_cases import BINARIZE, DPR, INPLACE, SSDC
from bench.papers.gist_cases import Case as Encoded
from bench.papers.library_view import library_view
from bench.papers.networks import Captures, vgg101_early
from bench.papers.vdnn_cases import Case as Managed
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
    assert page.PAGE.read_text(encoding="utf-8") == page.page(page.all_rows(), measured.runs())
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
    assert "| ✓ | I | a (1) | x | 10 GB | 10.5 GB |  |  |" in text
    assert "|  | I | b (2) | x | 10 GB | 20 GB |  | 1 |" in text
    assert "| – | I | c | x | 10 % | 10 % |  | 2 |" in text
    assert text.count("because") + text.count("Because") == 1 and "2. Density 0.5." in text


def step_row(policy, milliseconds, budget="12GiB", gib=10, network="vgg16", batch=256):
    return {
        "model": network, "batch": batch, "policy": policy, "budget": budget, "measured_s": milliseconds / 1e3,
        "budget_bytes": 12 * 2**30 if budget else None, "measured_peak_bytes": gib * 2**30, "dtype": "tf32",
        "channels_last": True, "gpu": "NVIDIA H100", "time_utc": "2026-01-01T00:00", "commit": "abc",
    }  # fmt: skip


def test_the_measured_column_compares_steps_of_one_run(tmp_path):
    old = [step_row("plain", 200, ""), step_row("vdnn-dyn", 250), step_row("cdma", 300)]
    new = [step_row("vdnn-all", 400), step_row("cdma", 320), {**step_row("plain", 1, ""), "error": "no memory"}]
    new[-1].pop("measured_s")
    for name, steps in (("2026-01-01-predictions", old), ("2026-01-02-predictions", new)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in steps))
    runs = measured.runs(tmp_path)
    dyn = SHEET.row("Abstract", "VGG-16", 256, "dyn in 12 GB: performance loss", 18, 18, "%")
    found = measured.measured(dyn, runs)
    assert found is not None and found.value == pytest.approx(20)
    assert found.origin == "Measured: vgg16 (256), tf32, channels_last, on an NVIDIA H100, 2026-01-01, commit abc"
    over = replace(SHEET.row("Abstract", "six networks", 0, "cDMA over vDNN, average", 32, 32, "%"), paper="cdma")
    found = measured.measured(over, runs)
    assert found is not None and found.value == pytest.approx(25)
    assert measured.measured(replace(dyn, batch=64), runs) is None
    assert "| 18 % | 18 % | 20 % | 1 |" in page.page([dyn], runs)


def test_claims_are_rows_of_the_tables():
    rows = {(r.paper, r.network, r.batch, r.metric) for r in page.all_rows()}
    assert set(measured.CLAIMS) <= rows


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


def test_vgg101_with_early_layers_has_modnns_bound(captures):
    case = modnn.Case.of(captures.of(vgg101_early, "vgg101", 128), "k40m")
    assert sum(task.conv is not None for task in case.graph.tasks if task.phase == "forward") == 16 + 82
    assert round(case.bound_bytes / 1e9, 1) == 1.4
    assert case.ideal_bytes / 1e9 == pytest.approx(100, rel=0.05)


def test_cdma_on_alexnet(captures):
    found = cdma.compare(captures.zoo("alexnet", 128), "titanx", cdma.DENSITY)
    assert found.ratio == pytest.approx(2.6, rel=1e-3)
    assert found.plain_s < found.engine_s < found.kernels_s < found.vdnn_s
