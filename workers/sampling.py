"""Chooses the next token from a row of logits.

Owns the sampling rules and the random numbers. The number for a position is Philox(seed, position), so the sampler's
whole state is the pair (seed, position): any worker continues a stream exactly, in any batch. Nothing is kept between
calls. It works on one row at a time, in a fixed order, so that company cannot change a choice.

Order of the rules: repetition penalty, presence and frequency penalties, bias, the grammar's mask, then greedy
(temperature 0) or temperature, top_k, top_p, min_p and the draw.
Log-probabilities are those of the model itself, before any of these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvstore.core.messages import SamplingParams, TokenLogprobs
from kvstore.errors import FatalError

Row = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Allowed = npt.NDArray[np.bool_]

_M0: Final = 0xD2511F53
_M1: Final = 0xCD9E8D57
_W0: Final = 0x9E3779B9
_W1: Final = 0xBB67AE85
_MASK: Final = 0xFFFFFFFF

HEAD_TOKENS: Final = 1024
"""top_p first looks at this many best tokens and sorts the whole vocabulary only when they do not suffice."""


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Returns four 32-bit words of Philox4x32 with ten rounds. Source: Salmon et al., "Parallel random numbers"."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(_M0 * c0, 1 << 32)
        high1, low1 = divmod(_M1 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Returns the random number of a position: a multiple of 2**-53 in [0, 1)."""
    counter = (position & _MASK, position >> 32, 0, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return ((high << 21) | (low >> 11)) * 2.0**-53


def sample(
    logits: Tensor,
    params: SamplingParams,
    position: int,
    output_token_ids: Sequence[int],
    *,
    prompt_token_ids: Sequence[int] = (),
    allowed: Allowed | None = None,
) -> tuple[int, TokenLogprobs | None]:
    """Chooses the token for ``position``.

    ``logits``: float32 (vocab_size,), of the model, unchanged by this call. ``position``: the new token's own index in
    the sequence, prompt included. ``output_token_ids``: the tokens generated so far, for the penalties;
    ``prompt_token_ids`` counts for the repetition penalty only. ``allowed``: bool (vocab_size,), what a grammar lets
    through; None lets everything through.
    Returns the token id and, when asked for, its log-probabilities. Raises FatalError when no logit is finite or one
    is not a number, or when ``allowed`` leaves nothing to choose.
    """
    row: Row = logits.numpy()
    if not np.isfinite(row.max()):
        raise FatalError(f"the model's logits for position {position} are not finite")
    adjusted = _adjusted(row, params, output_token_ids, prompt_token_ids)
    if allowed is not None:
        adjusted = np.where(allowed, adjusted, np.float32(-np.inf))
        if not np.isfinite(adjusted.max()):
            raise FatalError(f"the grammar leaves no token for position {position}")
    if params.temperature == 0.0:
        token_id = int(adjusted.argmax())  # The lowest id of equals.
    else:
        token_id = _draw(adjusted, params, uniform(params.seed, position))
    if params.num_logprobs is None:
        return token_id, None
    return token_id, token_logprobs(row, token_id, params.num_logprobs)


def token_logprobs(row: Row, token_id: int, num_top: int) -> TokenLogprobs:
    """Returns natural-log probabilities of ``token_id`` and the ``num_top`` best tokens, lowest id first of equals."""
    wide = row.astype(np.float64)
    highest = wide.max()
    log_total = highest + np.log(np.exp(wide - highest).sum())
    best = _best(row, num_top)
    top = tuple((int(index), float(wide[index] - log_total)) for index in best)
    return TokenLogprobs(logprob=float(wide[token_id] - log_total), top=top)


def _adjusted(
    row: Row, params: SamplingParams, output_token_ids: Sequence[int], prompt_token_ids: Sequence[int]
) -> Row:
    has_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    repeats = params.repetition_penalty != 1.0
    if not params.logit_bias and not repeats and not (has_penalty and output_token_ids):
        return row
    changed = row.copy()
    if repeats:
        seen = np.unique(np.asarray((*prompt_token_ids, *output_token_ids), dtype=np.int64))
        factor = np.float32(params.repetition_penalty)
        changed[seen] = np.where(changed[seen] > 0, changed[seen] / factor, changed[seen] * factor)
    if has_penalty and output_token_ids:
        ids, counts = np.unique(np.asarray(output_token_ids, dtype=np.int64), return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        changed[ids] -= penalty.astype(np.float32)
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < len(changed):
            changed[token_id] += np.float32(bias)
    return changed


def _draw(row: Row, params: SamplingParams, random: float) -> int:
    ids, weights = _candidates(row, params)
    totals = np.cumsum(weights)
    # side="right" skips candidates without weight; rounding may lead past the end, never before the start.
    index = min(int(np.searchsorted(totals, random * totals[-1], side="right")), int(np.flatnonzero(weights)[-1]))
    return int(index if ids is None else ids[index])


def _candidates(row: Row, params: SamplingParams) -> tuple[npt.NDArray[np.int64] | None, Weights]:
    """Returns the ids that may be drawn (None: all, in order of id) and their weights, not normalised."""
    limit = params.top_k if 0 < params.top_k < len(row) else len(row)
    if limit == len(row) and params.top_p == 1.0:
        weights = _weights(row, row.max(), params.temperature)
        return None, np.where(weights >= params.min_p, weights, 0.0)
    highest = row.max()
    # Without top_k the share of a token is that of the whole vocabulary.
    total = _weights(row, highest, params.temperature).sum() if limit == len(row) else None
    count = min(limit, HEAD_TOKENS)
    while True:
        ids = _best(row, count)
        weights = _weights(row[ids], highest, params.temperature)
        sums = np.cumsum(weights)
        goal = params.top_p * (sums[-1] if total is None else total)
        if count == limit or (total is not None and sums[-1] >= goal):
            break
        count = limit
    # The token that reaches the goal is the last one kept.
    kept = min(int(np.searchsorted(sums, goal, side="left")) + 1, len(ids)) if params.top_p < 1.0 else len(ids)
    ids, weights = ids[:kept], weights[:kept]
    return ids, np.where(weights >= params.min_p, weights, 0.0)


def _weights(logits: Row, highest: np.float32, temperature: float) -> Weights:
    """Returns exp of the scaled distance to the best logit: 1 for the best token."""
    distance = logits.astype(np.float64) - np.float64(highest)
    # A tiny temperature may overflow to minus infinity, whose weight is the right one: 0.
    with np.errstate(over="ignore"):
        return np.exp(distance / temperature)


def _best(row: Row, count: int) -> npt.NDArray[np.int64]:
    """Returns the ids of the ``count`` highest logits, highest first, lowest id first of equals."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    if count < len(row):
        border = np.partition(row, len(row) - count)[len(row) - count]
        pool = np.flatnonzero(row >= border)
    else:
        pool = np.arange(len(row))
    order = np.argsort(-row[pool], kind="stable")
    return pool[order][:count].astype(np.int64)
