"""Attention over long contexts: right, and the same bits by both paths and any padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from workers.model.attention import Attention, Span, make_single_group, padded_table

BLOCK_TOKENS = 16
MAX_KEYS = 2304


def make_pool(num_kv_heads: int, head_size: int) -> torch.Tensor:
    """Builds a one-layer pool of random keys and values, large enough for ``MAX_KEYS``."""
    source = torch.Generator().manual_seed(2)
    return torch.randn(MAX_KEYS // BLOCK_TOKENS, 1, 2, num_kv_heads, BLOCK_TOKENS, head_size, generator=source)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (1, 1, 16)])
def test_one_query_has_the_same_bits_alone_and_in_a_span(num_heads: int, num_kv_heads: int, head_size: int) -> None:
    """At contexts around every border of keys and tiles, a query alone, in a batch and in a span agree bitwise."""
    attention = Attention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)
    pool = make_pool(num_kv_heads, head_size)
    blocks = torch.randperm(len(pool), generator=torch.Generator().manual_seed(3)).tolist()
    queries = torch.randn(MAX_KEYS, num_heads, head_size, generator=torch.Generator().manual_seed(4))
    last = 2200
    table = torch.tensor(padded_table(blocks, last, BLOCK_TOKENS))
    whole = attention.run_span(queries[:last], pool, 0, Span(0, last, 0, table))
    sizes = [1, 2, 63, 64, 65, 170, 171, 300, 511, 512, 513, 575, 640, 1023, 1024, 1025, 1088, 1537, 2048, 2049, 2200]
    for num_keys in sizes:
        position = num_keys - 1
        table_here = padded_table(blocks, num_keys, BLOCK_TOKENS)
        query = queries[position : position + 1]
        alone = attention.run_singles(query, pool, 0, make_single_group(None, [num_keys], [table_here], BLOCK_TOKENS))
        assert torch.equal(alone[0], whole[position]), num_keys
        longest = padded_table(blocks, last, BLOCK_TOKENS)
        pair = make_single_group(None, [last, num_keys], [longest, table_here], BLOCK_TOKENS)
        both = attention.run_singles(torch.cat((queries[last - 1 : last], query)), pool, 0, pair)
        assert torch.equal(both[1], whole[position]), num_keys
        start = max(0, position - 20)
        part = attention.run_span(
            queries[start:num_keys], pool, 0, Span(0, num_keys - start, start, torch.tensor(table_here))
        )
        assert torch.equal(part, whole[start:num_keys]), num_keys


def test_outputs_are_those_of_plain_attention() -> None:
    """Against torch's own attention over the gathered keys and values."""
    attention = Attention(num_heads=6, num_kv_heads=2, head_size=32)
    pool = make_pool(2, 32)
    blocks = list(range(50, 0, -1))
    queries = torch.randn(700, 6, 32, generator=torch.Generator().manual_seed(5))
    table = torch.tensor(padded_table(blocks, 700, BLOCK_TOKENS))
    got = attention.run_span(queries, pool, 0, Span(0, 700, 0, table))
    ordered = pool[blocks, 0].permute(1, 2, 0, 3, 4).reshape(2, 2, -1, 32)[:, :, :700].repeat_interleave(3, 1)
    expected = F.scaled_dot_product_attention(queries.transpose(0, 1), *ordered, is_causal=True).transpose(0, 1)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_table_is_padded_with_its_own_last_slot() -> None:
    """No other request's block is ever read: its bytes may be under way."""
    assert padded_table([7, 3, 9, 5, 8], 17, 16) == [7, 3, 3, 3]
    assert padded_table([7, 3, 9, 5, 8], 65, 16) == [7, 3, 9, 5, 8, 8, 8, 8]
