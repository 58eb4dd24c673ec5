"""SavedGraph as data: look-ups, fingerprint, JSON."""

import dataclasses
import json

from gistkit.ir.saved_graph import Call, Save, SavedGraph, SavedStorage, Value


def graph(n=2, extra_read=()):
    """x -> conv2d -> relu -> conv2d, written by hand; storages 0 input, 1 weight, 2 conv, 3 relu, 4 conv."""
    shape = (n, 8)

    def save(storage, field, value, read=True):
        return Save(storage, "Node", field, shape, "float32", read, value)

    calls = (
        Call(0, "conv2d", 0, "a", (0, 1), (2,), (save(0, "input", 0), save(1, "weight", 1)), False, {"groups": 1},
             (0, 1), (2,)),
        Call(1, "relu", 1, "", (2, *extra_read), (3,), (save(3, "result", 3),), False, {"inplace": False}, (2,), (3,)),
        Call(2, "conv2d", 2, "b", (3, 1), (4,), (save(3, "input", 3), save(1, "weight", 1)), False, None, (3, 1), (4,)),
    )  # fmt: skip
    kinds = ("input", "parameter", "activation", "activation", "activation")
    storages = tuple(
        SavedStorage(i, n * 32, "float32", shape, kind, producer, i == 4, 0.25 if i == 3 else None)
        for i, (kind, producer) in enumerate(zip(kinds, (-1, -1, 0, 1, 2), strict=True))
    )
    values = tuple(Value(i, i, 0, shape, "float32", True, s.producer) for i, s in enumerate(storages))
    return SavedGraph(calls, storages, "fake", values)


def test_look_ups():
    g = graph()
    assert [c.index for c in g.readers(1)] == [0, 2] and g.readers(4) == ()
    assert [(c.index, s.field) for c, s in g.savers(3)] == [(1, "result"), (2, "input")] and g.savers(2) == ()
    assert [c.index for c in g.writers(3)] == [1] and g.writers(0) == ()
    assert [s.id for s in g.kept()] == [0, 3], "no parameters, nothing that backward does not keep"
    assert g.kept_bytes == 2 * 64, "each storage once, however many savers"


def test_json_round_trip():
    g = dataclasses.replace(graph(n=4), batch=4, least_rows=2, small=graph(n=2))
    again = SavedGraph.from_json(g.to_json())
    assert again == g and again.fingerprint == g.fingerprint
    assert json.loads(g.to_json())["calls"][0]["options"] == {"groups": 1}


def test_the_fingerprint_is_dataflow_without_shapes():
    g = graph()
    assert graph(n=7).fingerprint == g.fingerprint
    assert graph(extra_read=(0,)).fingerprint != g.fingerprint
    other = dataclasses.replace(g.calls[1], inplace=True)
    assert SavedGraph((g.calls[0], other, g.calls[2]), g.storages).fingerprint != g.fingerprint
    uncovered = Call(3, "print", -1, "", (4,), ())
    assert SavedGraph((*g.calls, uncovered), g.storages).fingerprint == g.fingerprint
