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


def llama(**words):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **words)
    model, ids = transformers.LlamaForCausalLM(config).train(), torch.randint(4, 64, (8, 32))
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("policy", ["checkpoint", "blocks"])
def test_positions_that_the_model_counts_itself_show_one_sequence_a_row(policy):
    """Without a mask and a cache it looks in them for several, on real values alone."""
    plain, batch = llama(use_cache=False)
    gistkit.measure(plain, batch, loss_fn=lambda out: out.loss)
    plan = gistkit.plan(plain, batch, loss_fn=lambda out: out.loss, budget="60%", policy=policy)
    if policy == "blocks":
        assert plan.modules and all(name.startswith("model.layers.") for name in plan.modules)
    model = gistkit.compress(copy.deepcopy(plain), plan)
    for m in (plain, model):
        m(**batch).loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_plan_says_that_a_cache_keeps_blocks_from_running_anew():
    model, batch = llama()
    plan = gistkit.plan(model, batch, loss_fn=lambda out: out.loss, budget="60%")
    assert plan.details["host"].endswith("set model.config.use_cache = False and plan again")
    without = {**batch, "use_cache": False}
    assert "host" not in gistkit.plan(model, without, loss_fn=lambda out: out.loss, budget="60%").details
    model.config.use_cache = False
    assert "host" not in gistkit.plan(model, batch, loss_fn=lambda out: out.loss, budget="60%").details
