"""A plan under a budget of a transformers' decoder, which leaves out an attention mask that hides nothing."""

import copy

import pytest
import torch

import gistkit


def test_a_budget_is_kept_bit_for_bit_where_a_mask_hides_nothing():
    """With fewer heads of keys than of queries the model then runs its attentions by other calls."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    plain = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(4, 64, (8, 32))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    plan = gistkit.plan(plain, batch, loss_fn=lambda out: out.loss, budget="60%", hold_output=False)
    assert any(d.codec == "recompute" for d in plan.decisions)
    model = gistkit.compress(copy.deepcopy(plain), plan)
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad(set_to_none=True)
            with gistkit.LiveBytes(timeline=False) as live:
                live.track(m, *batch.values())
                gistkit.step(m, lambda out: out.loss, batch) if m is model else m(**batch).loss.backward()
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
        assert live.peak_bytes <= plan.budget_bytes
