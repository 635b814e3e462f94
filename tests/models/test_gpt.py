"""The GPT has GPT-2's parameters, ignores the future, and drops the same in any batch."""

from __future__ import annotations

import pytest
import torch

from dtlab.errors import ConfigError
from dtlab.models import GPT, GPT2_SMALL, GPTConfig, text, text_batch
from dtlab.models.dropout import counter_dropout

SMALL = GPTConfig(layers=2, hidden=32, heads=4, context=16, vocab=256)


def test_gpt2_small_has_its_parameters() -> None:
    assert sum(p.numel() for p in GPT(GPT2_SMALL, device="meta").parameters()) == 124_439_808


def test_attention_is_that_of_torch() -> None:
    """The same layer as torch's own encoder layer with the same weights, causal mask, pre-norm."""
    gpt = GPT(SMALL, dtype=torch.float64)
    block = gpt.blocks[0]
    theirs = torch.nn.TransformerEncoderLayer(32, 4, 128, 0.0, "gelu", batch_first=True,
                                              norm_first=True, dtype=torch.float64)
    theirs.load_state_dict({
        "self_attn.in_proj_weight": block.attention.qkv.weight,
        "self_attn.in_proj_bias": block.attention.qkv.bias,
        "self_attn.out_proj.weight": block.attention.out.weight,
        "self_attn.out_proj.bias": block.attention.out.bias,
        "linear1.weight": block.mlp_up.weight, "linear1.bias": block.mlp_up.bias,
        "linear2.weight": block.mlp_down.weight, "linear2.bias": block.mlp_down.bias,
        "norm1.weight": block.attention_norm.weight, "norm1.bias": block.attention_norm.bias,
        "norm2.weight": block.mlp_norm.weight, "norm2.bias": block.mlp_norm.bias,
    })
    x = torch.randn(3, 7, 32, dtype=torch.float64)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    torch.testing.assert_close(block(x), theirs(x, src_mask=mask, is_causal=True))


def test_grouped_queries_share_keys_and_values() -> None:
    grouped = GPT(GPTConfig(layers=1, hidden=32, heads=4, kv_heads=2, context=16),
                  dtype=torch.float64).blocks[0].attention
    full = GPT(GPTConfig(layers=1, hidden=32, heads=4, context=16),
               dtype=torch.float64).blocks[0].attention
    for ours, theirs in zip(grouped.qkv.parameters(), full.qkv.parameters(), strict=True):
        q, k, v = ours.detach().split([32, 16, 16])
        k, v = (t.unflatten(0, (2, 1, 8)).expand(2, 2, 8, *t.shape[1:]).flatten(0, 2)
                for t in (k, v))
        theirs.data = torch.cat([q, k, v])
    full.out = grouped.out
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    torch.testing.assert_close(grouped(x, None), full(x, None))


def test_logits_do_not_depend_on_later_tokens() -> None:
    gpt = GPT(SMALL, dtype=torch.float64)
    tokens, _ = text_batch(0, 2, 16)
    changed = tokens.clone()
    changed[:, 10:] = 0
    torch.testing.assert_close(gpt(tokens)[:, :10], gpt(changed)[:, :10], rtol=0, atol=0)


def test_a_sample_meets_the_same_dropout_in_any_batch() -> None:
    gpt = GPT(GPTConfig(layers=2, hidden=32, heads=4, context=16, dropout=0.3), dtype=torch.float64)
    tokens, _ = text_batch(0, 4, 16)
    seeds = torch.tensor([5, 6, 7, 8])
    whole = gpt(tokens, seeds)
    torch.testing.assert_close(whole[2:], gpt(tokens[2:], seeds[2:]))
    assert not torch.equal(whole, gpt(tokens, seeds + 1))
    gpt.eval()
    torch.testing.assert_close(gpt(tokens, seeds), gpt(tokens))


def test_dropout_keeps_the_mean_and_a_part_drops_as_the_whole() -> None:
    x, seeds = torch.ones(50, 40, 30), torch.arange(50)
    dropped = counter_dropout(x, 0.25, seeds, site=3)
    assert abs(float((dropped == 0).float().mean()) - 0.25) < 0.005
    assert abs(float(dropped.mean()) - 1) < 0.01
    index = torch.arange(40 * 30).view(40, 30)[:, 10:20]
    assert torch.equal(counter_dropout(x[:, :, 10:20], 0.25, seeds, 3, index), dropped[:, :, 10:20])


@pytest.mark.parametrize(("sizes", "sentence"), [
    ({"heads": 3}, "3 heads don't divide hidden=128"),
    ({"kv_heads": 3}, "kv_heads=3 doesn't divide heads=4"),
    ({"layers": 0}, "layers must be a whole number, 1 or more, not 0"),
    ({"vocab": 2.5}, "vocab must be a whole number"),
    ({"dropout": 1}, "dropout must lie in"),
])
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        GPTConfig(**sizes)


def test_the_text_is_there() -> None:
    assert 300_000 < len(text()) < 2_000_000
    tokens, targets = text_batch(3, 5, 20)
    assert tokens.shape == targets.shape == (5, 20)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    with pytest.raises(ConfigError, match="positions are more than its context"):
        GPT(SMALL)(tokens)
