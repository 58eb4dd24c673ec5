"""The bench that trains whole networks twice and compares every bit."""

import json

import torch

from bench import bitwise


def run(tmp_path):
    out = tmp_path / "rows" / "bitwise.jsonl"
    status = bitwise.main(["--out", str(out), "--device", "cpu", "--models", "squeezenet", "--steps", "1"])
    return status, [json.loads(line) for line in out.read_text().splitlines()]


def test_a_network_of_the_zoo(tmp_path):
    status, (row,) = run(tmp_path)
    assert status == 0 and row["equal"] and row["differs"] == ""
    assert (row["model"], row["steps"]) == ("squeezenet", 1) and row["plain_bytes"] > 2 * row["kept_bytes"]


def test_one_bit_is_seen(tmp_path, monkeypatch):
    trained, calls = bitwise.trained, []

    def nudged(model, data):
        found = trained(model, data)
        if not calls:
            name = next(n for n in found if n.startswith("gradient of"))
            found[name] = torch.nextafter(found[name], torch.full_like(found[name], torch.inf))
        calls.append(model)
        return found

    monkeypatch.setattr(bitwise, "trained", nudged)
    status, (row,) = run(tmp_path)
    assert status == 1 and not row["equal"] and row["differs"].startswith("gradient of")
