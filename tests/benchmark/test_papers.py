"""The papers' tables: rows, their page, and what the small networks' rows are made from."""

import json
import os
from dataclasses import replace

import pytest

from bench.papers import cdma, measured, page
from bench.papers.baselines import gradient_maps, most_at_once, network_wide
from bench.papers.common import AT_LEAST, AT_MOST, PAPERS, ROOT, Sheet, path_of, read, write
from bench.papers.gist_cases import BINARIZE, DPR, INPLACE, SSDC
from bench.papers.gist_cases import Case as Encoded
from bench.papers.library_view import library_view
from bench.papers.networks import Captures
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


def step_row(policy, milliseconds, budget="12GiB", gib=10, network="vgg16", batch=256):
    """Of a run on a card; above 12 GiB there was no plan within the budget."""
    within = 12 * 2**30 if budget and gib < 12 else None
    return {
        "model": network, "batch": batch, "policy": policy, "budget": budget, "measured_s": milliseconds / 1e3,
        "budget_bytes": within, "measured_peak_bytes": gib * 2**30, "dtype": "tf32",
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
    in_bf16 = [{**r, "dtype": "bf16", "measured_s": r["measured_s"] / 2} for r in (old[0], *new[:2])]
    (tmp_path / "2026-01-03-predictions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in old[1:2] + in_bf16))
    found = measured.measured(dyn, measured.runs(tmp_path))
    assert found is not None and found.value == pytest.approx(20), "bf16's plain is no peer of tf32's policy"
    assert "| 18 % | 18 % | 20 % | 1 |" in page.page([dyn], runs)


def test_a_policy_without_a_plan_within_the_budget_is_a_finding(tmp_path):
    steps = [step_row("plain", 200, ""), step_row("vdnn-dyn", 210, gib=16), step_row("vdnn-all", 600, gib=13)]
    steps += [step_row("cdma", 400)]
    (tmp_path / "2026-01-01-predictions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in steps))
    runs = measured.runs(tmp_path)
    dyn = SHEET.row("Abstract", "VGG-16", 256, "dyn in 12 GB: performance loss", 18, 18, "%")
    text = page.page([dyn], runs)
    assert "| 18 % | 18 % | no plan | 1 |" in text
    assert "1. No plan of vdnn-dyn within 12GiB (16.0 GiB without a budget): vgg16 (256), tf32" in text
    over = replace(SHEET.row("Abstract", "six networks", 0, "cDMA over vDNN, most", 61, 61, "%"), paper="cdma")
    found = measured.measured(over, runs)
    assert found is not None and found.value == pytest.approx(50), "the schedules are compared, whatever they hold"


@pytest.mark.parametrize("key", sorted(measured.CLAIMS), ids=lambda key: "-".join(map(str, key))[:40])
def test_every_claim_is_filled_by_the_rows_that_it_names(key, tmp_path):
    claim, written = measured.CLAIMS[key], []
    for steps in claim.networks:
        for number, step in enumerate(steps):
            written.append(step_row(step.policy, 200 + number, step.budget, 4, step.network, step.batch))
    (tmp_path / "2026-01-01-predictions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in written))
    row = next(r for r in page.all_rows() if (r.paper, r.network, r.batch, r.metric) == key)
    found = measured.measured(row, measured.runs(tmp_path))
    assert found is not None and found.value is not None
    assert f" {found.value:.3g} {row.unit} |" in page.page([row], measured.runs(tmp_path))


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


def test_vdnns_accounting_leaves_weight_gradients_out(managed):
    everything = network_wide(managed.graph, managed.costs).total_bytes
    weights = sum(b.nbytes for b in managed.graph.blocks if b.kind == "weight_gradient")
    workspace = max(managed.costs.workspace_bytes(t.index) for t in managed.graph.tasks)
    assert managed.baseline_bytes("m") == everything - weights - workspace
    assert managed.baseline_bytes("p") / 1e9 == pytest.approx(recorded("vdnn", "AlexNet", "baseline (p)"), rel=1e-3)
    features = managed.baseline_bytes("m", managed=True)
    classifier = 4 * (4096 * 9216 + 4096 + 4096 * 4096 + 4096 + 1000 * 4096 + 1000)
    assert managed.baseline_bytes("m") - features == pytest.approx(classifier, rel=0.06)  # and its small maps


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


def test_cdma_on_alexnet(captures):
    found = cdma.compare(captures.zoo("alexnet", 128), "titanx", cdma.DENSITY)
    assert found.ratio == pytest.approx(2.6, rel=1e-3)
    assert found.plain_s < found.engine_s < found.kernels_s < found.vdnn_s
