"""Block movers: paged and contiguous KV, other shards, other block sizes, other dtypes."""
