"""Choosing a token: noise that is a function of (seed, position, token id), filters, and one argmax.

A token is the argmax of score + Gumbel noise, which is a draw from softmax(score). The noise depends on nothing else, so
plain, speculative, batched and sharded decoding choose the same token for the same seed and prefix.

Only sums of probabilities round; maxima, top candidates, counts and first ids are exact however the vocabulary is split.
So the sums alone are bound to eight fixed vocabulary partitions added in order (`partition_sums`, `sum_in_order`), and
a device that holds some of the partitions forms the same bits as one that holds them all.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NUM_PARTITIONS = 8
NUM_CANDIDATES = 1024  # sorted best scores that top-k and top-p look at before they fall back to bisection

# A quotient logit / T may overflow below this temperature, so create() takes it for 0.
_MIN_TEMPERATURE = 1e-30
_MAX_INT32 = 2**31 - 1
_CHAIN_SALT = 0x5D15A17E  # on the high word of the seed


class SamplingMode(enum.StrEnum):
    """How much of the work a batch needs; static, so that jit compiles no more than that."""

    GREEDY = "greedy"  # every temperature is 0: argmax of the logits
    NOISE = "noise"  # some temperature above 0, no filter
    FILTERED = "filtered"  # some row with a temperature above 0 has a filter


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("temperature", "top_k", "top_p", "min_p", "seed_lo", "seed_hi"),
    meta_fields=("mode",),
)
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Per-row settings, all [B]. Make one with `create`, which validates and picks the mode."""

    temperature: jax.Array  # f32; 0: greedy, whatever the other fields say
    top_k: jax.Array  # int32; 0: off
    top_p: jax.Array  # f32; 1: off
    min_p: jax.Array  # f32; 0: off
    seed_lo: jax.Array  # uint32, low word of the seed
    seed_hi: jax.Array  # uint32
    mode: SamplingMode

    @classmethod
    def create(
        cls,
        batch: int,
        *,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        seed: int | Sequence[int] = 0,
    ) -> SamplingParams:
        """Validated parameters of `batch` rows, each given once for all rows or as a list with one entry per row.

        Row b of a single seed s uses s + b (mod 2^64). A temperature below 1e-30 counts as 0.

        Raises:   ValueError naming the field, its value and what is allowed.
        """
        if not _is_integer(batch) or batch < 1:
            raise ValueError(f"batch = {batch!r}: expected an integer of at least 1")
        f32_max = float(np.finfo(np.float32).max)
        t = _floats("temperature", temperature, batch, lambda x: 0 <= x <= f32_max, "a finite number of at least 0")
        k = _per_row("top_k", top_k, batch, _is_integer, lambda x: 0 <= x <= _MAX_INT32, "an integer from 0 to 2^31 - 1")
        p = _floats("top_p", top_p, batch, lambda x: 0 < x <= 1, "a number above 0 and at most 1")
        m = _floats("min_p", min_p, batch, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        t = np.where(t < _MIN_TEMPERATURE, np.float32(0), t)
        k = np.asarray(k, np.int32)
        sampled = t > 0
        if not sampled.any():
            mode = SamplingMode.GREEDY
        elif (sampled & ((k > 0) | (p < 1) | (m > 0))).any():
            mode = SamplingMode.FILTERED
        else:
            mode = SamplingMode.NOISE
        lo, hi = split_seeds(seed, batch)
        return cls(*jax.device_put((t, k, p, m, lo, hi)), mode=mode)


def split_seeds(seed: int | Sequence[int], batch: int) -> tuple[np.ndarray, np.ndarray]:
    """The low and high words of the seeds of `batch` rows.

    Args:     seed: one for the request, row b then uses seed + b (mod 2^64); or a list with one per row.
    Returns:  lo, hi: [batch] uint32.
    Raises:   ValueError for a seed that is not an integer from 0 to 2^64 - 1, or a list of another length.
    """
    seeds = _per_row("seed", seed, batch, _is_integer, lambda x: 0 <= x < 2**64, "an integer from 0 to 2^64 - 1")
    step = 0 if _is_list(seed) else 1
    words = np.asarray([(int(s) + step * row) % 2**64 for row, s in enumerate(seeds)], np.uint64)
    return (words & np.uint64(0xFFFFFFFF)).astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)


def noise_bits(seed_lo: jax.Array, seed_hi: jax.Array, pos: jax.Array, vocab_ids: jax.Array) -> jax.Array:
    """The 32 random bits behind each noise value; arguments as in `gumbel_noise`. Returns uint32."""
    if pos.ndim not in (1, 2) or seed_lo.shape != pos.shape[:1] or seed_hi.shape != pos.shape[:1]:
        raise ValueError(f"seeds {seed_lo.shape} and {seed_hi.shape}, pos {pos.shape}: expected [B], [B] and [B] or [B, T]")
    lo, hi = _expand(seed_lo, pos.ndim), _expand(seed_hi, pos.ndim)
    key = _fmix(lo + jnp.uint32(0x9E3779B9))
    key = _fmix(key ^ hi)
    key = _fmix(key + pos.astype(jnp.uint32) * jnp.uint32(0x9E3779B1))
    table = _fmix(vocab_ids * jnp.uint32(0x85EBCA77) + jnp.uint32(0x165667B1))
    return _fmix(key[..., None] ^ (lax.expand_dims(table, range(pos.ndim)) if table.ndim == 1 else table))


def gumbel_noise(seed_lo: jax.Array, seed_hi: jax.Array, pos: jax.Array, vocab_ids: jax.Array) -> jax.Array:
    """Gumbel noise as a pure function of seed, absolute position of the token being chosen, and token id.

    Args:     seed_lo, seed_hi: [B] uint32.  pos: [B] or [B, T] int32 or uint32.
              vocab_ids: uint32, [V], or [B(, T), V] where every position has its own.
    Returns:  [B(, T), V] f32 from about -2.8 to 22.9.
    Raises:   ValueError if the shapes do not fit.
    Rounding: the uniform number is exact up to its one rounding to f32; the two logarithms are the backend's.
    """
    return -jnp.log(-jnp.log1p(-_unit(noise_bits(seed_lo, seed_hi, pos, vocab_ids))))


class Draw(enum.IntEnum):
    """What a uniform number of the rejection-sampled chain decides."""

    ACCEPT = 0  # whether the token proposed for this position stays
    RESIDUAL = 1  # which token takes its place, or follows the last one
    PROPOSE = 2  # which token the draft proposes


def uniforms(params: SamplingParams, pos: jax.Array, draw: Draw) -> jax.Array:
    """Numbers from 0 to 1, independent of the Gumbel noise, for the chain of dflash2.md section 4. pos: [B, T]."""
    return _unit(noise_bits(params.seed_lo, params.seed_hi ^ jnp.uint32(_CHAIN_SALT), pos, jnp.uint32([draw])))[..., 0]


def _unit(bits: jax.Array) -> jax.Array:
    """32 random bits as an f32 above 0 and below 1."""
    # bits + 0.5 in two exact halves, so that their sum is its one rounding; casting all 32 bits would round before adding.
    high = (bits >> 16).astype(jnp.float32) * 2.0**16
    low = (bits & jnp.uint32(0xFFFF)).astype(jnp.float32) + 0.5
    return jnp.minimum((high + low) * 2.0**-32, 1 - 2.0**-24)


def choose(logits: jax.Array, pos: jax.Array, params: SamplingParams, valid_vocab: int) -> jax.Array:
    """The next token of every row.

    Args:     logits: [B, V] or [B, T, V] f32, after multiplier and softcap, finite or -inf.  pos: [B] or [B, T] int32,
              absolute position of the token being chosen (n for the first one after a prompt of n tokens).
              valid_vocab: static; ids from here on are padding and are never chosen.
    Returns:  [B] or [B, T] int32, ties to the lowest id. A row of NaN gives the last valid id.
    Raises:   ValueError if shapes, dtype or valid_vocab do not fit.
    """
    if pos.shape != logits.shape[:-1]:
        raise ValueError(f"pos has shape {pos.shape}: expected that of logits without the vocabulary, {logits.shape[:-1]}")
    scores = filter_scores(logits, params, valid_vocab)
    if params.mode != SamplingMode.GREEDY:
        ids = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
        sampled = _expand(params.temperature, logits.ndim) > 0
        scores = jnp.where(sampled, scores + gumbel_noise(params.seed_lo, params.seed_hi, pos, ids), scores)
    # Two reductions in place of jnp.argmax: XLA for CPU evaluates what it fuses into an argmax one number at a time
    # (V = 202,048 with noise, two cores: 11.0 ms against 1.5 ms, jax 0.10.2).
    best = jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(scores == best, _ids(scores), valid_vocab - 1), axis=-1)


def filter_scores(logits: jax.Array, params: SamplingParams, valid_vocab: int) -> jax.Array:
    """Scores that `choose` adds noise to: logits / T, and -inf where padding or a filter drops the token.

    top-k, top-p and min-p follow transformers' warpers in that order, each on what the previous one left. Equal scores
    rank by id, so that of a tied group at the border of top-p the lowest ids stay (transformers leaves this open); top-k
    keeps all of them. Rows of temperature 0 are not divided and not filtered.

    Args:     logits: [B, V] or [B, T, V] f32.  valid_vocab: static, from 1 to V.
    Returns:  f32, shape of logits.
    Raises:   ValueError if shapes, dtype or valid_vocab do not fit.
    Source:   transformers 5.24.0, generation/logits_process.py.
    """
    vocab = logits.shape[-1]
    batch = params.temperature.shape
    if logits.ndim not in (2, 3) or logits.shape[:1] != batch or logits.dtype != jnp.float32:
        raise ValueError(
            f"logits are {logits.dtype}{list(logits.shape)}: expected float32 [B, V] or [B, T, V] with B = {batch[0]}"
        )
    if not 1 <= valid_vocab <= vocab:
        raise ValueError(f"valid_vocab = {valid_vocab}: expected an integer from 1 to V = {vocab}")
    scores = logits if valid_vocab == vocab else jnp.where(_ids(logits) < valid_vocab, logits, -jnp.inf)
    if params.mode == SamplingMode.GREEDY:
        return scores

    temperature, top_k, top_p, min_p = (
        _expand(x, scores.ndim) for x in (params.temperature, params.top_k, params.top_p, params.min_p)
    )
    sampled = temperature > 0
    scores = scores / jnp.where(sampled, temperature, 1.0)
    if params.mode == SamplingMode.NOISE:
        return scores
    scores = jnp.where(scores == 0, 0.0, scores)  # -0.0 sorts below 0.0 but equals it
    top_k = jnp.where(sampled & (top_k < vocab), top_k, 0)
    top_p = jnp.where(sampled, top_p, 1.0)
    min_p = jnp.where(sampled, min_p, 0.0)

    score, last_id = _border(scores, top_k, top_p)
    kept = (scores > score) | ((scores == score) & (_ids(scores) <= last_id))
    kept &= jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)) >= min_p
    return jnp.where(kept, scores, -jnp.inf)


def partition_sums(x: jax.Array) -> jax.Array:
    """[..., V] -> [..., 8]: the sum of each eighth of the vocabulary, which is padded with zeros to a multiple of eight.

    The tree of additions is written out: XLA orders a reduction by the shape and the fusion it finds it in.
    """
    size = -(-x.shape[-1] // NUM_PARTITIONS)
    x = _pad_last(x, 0, size * NUM_PARTITIONS - x.shape[-1]).reshape(*x.shape[:-1], NUM_PARTITIONS, size)
    width = 1 << (size - 1).bit_length()
    x = _pad_last(x, 0, width - size)
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def sum_in_order(partials: jax.Array) -> jax.Array:
    """[..., 8] -> [..., 1]: partial sums added from partition 0 to partition 7."""
    return functools.reduce(jnp.add, jnp.split(partials, NUM_PARTITIONS, axis=-1))


def _border(scores: jax.Array, top_k: jax.Array, top_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The last token that top-k and top-p keep, in the order of falling scores and, among equals, rising ids.

    Args:     scores: [..., V] f32.  top_k: [..., 1] int32 below V, 0: off.  top_p: [..., 1] f32, 1: off.
    Returns:  its score [..., 1] f32 and id [..., 1] int32 (V - 1 where all tokens of that score stay).
    """
    vocab = scores.shape[-1]
    best, best_ids = lax.top_k(scores, min(NUM_CANDIDATES, vocab))  # equal scores: lowest id first
    top = jnp.max(scores, axis=-1, keepdims=True)  # a slice of `best` would keep XLA from seeing a top-k in its sort

    kth = jnp.take_along_axis(best, jnp.clip(top_k - 1, 0, best.shape[-1] - 1), axis=-1)
    floor = jnp.where(top_k > 0, kth, -jnp.inf)
    limit = _mass_limit(_weights(scores, floor, top), top_p)
    mass = jnp.cumsum(_weights(best, floor, top), axis=-1)
    mass_before = _pad_last(mass[..., :-1], 1, 0)
    num_kept = jnp.sum((mass_before < limit) & (best >= floor), axis=-1, keepdims=True, dtype=jnp.int32)
    last = jnp.maximum(num_kept, 1) - 1
    score = jnp.where(top_p < 1, jnp.take_along_axis(best, last, axis=-1), floor)
    last_id = jnp.where(top_p < 1, jnp.take_along_axis(best_ids, last, axis=-1), vocab - 1)

    beyond = (top_k > best.shape[-1]) | ((top_p < 1) & (mass[..., -1:] < limit))

    def bisect() -> tuple[jax.Array, jax.Array]:
        exact_score, exact_id = _border_by_bisection(scores, top, top_k, top_p)
        # Row by row, so that a row's choice does not depend on its neighbours in the batch.
        return jnp.where(beyond, exact_score, score), jnp.where(beyond, exact_id, last_id)

    return lax.cond(jnp.any(beyond), bisect, lambda: (score, last_id))


def _border_by_bisection(scores: jax.Array, top: jax.Array, top_k: jax.Array, top_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_border` for any border, from passes over all scores that count or sum; nothing is sorted."""
    keys, ids = _ordered_keys(scores), _ids(scores)

    def smallest_score(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return _from_ordered_keys(_smallest(lambda key: holds(keys > key), top.shape, num_bits=32))

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)

    floor = jnp.where(top_k > 0, smallest_score(lambda above: count(above) < top_k), -jnp.inf)
    weights = _weights(scores, floor, top)
    limit = _mass_limit(weights, top_p)

    def mass(mask: jax.Array) -> jax.Array:
        return sum_in_order(partition_sums(jnp.where(mask, weights, 0.0)))

    score = jnp.maximum(floor, smallest_score(lambda above: mass(above) < limit))
    tied = scores == score
    # Token j of the tied ones, each of weight w, stays while mass(above) + j w < limit: always, if top-p is off.
    num_tied = jnp.ceil((limit - mass(scores > score)) / jnp.exp(score - top))
    num_tied = jnp.minimum(num_tied, count(tied).astype(jnp.float32)).astype(jnp.int32)
    last_id = _smallest(
        lambda i: count(tied & (ids <= i.astype(jnp.int32))) >= num_tied, top.shape, num_bits=ids.size.bit_length()
    )
    return score, last_id.astype(jnp.int32)


def _weights(scores: jax.Array, floor: jax.Array, top: jax.Array) -> jax.Array:
    """Unnormalised probabilities of the scores from `floor` up; 0, not NaN, for -inf in a row of nothing else."""
    return jnp.where((scores >= floor) & (scores > -jnp.inf), jnp.exp(scores - top), 0.0)


def _mass_limit(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """top-p keeps a token while the weights before it sum to less than this [..., 1]."""
    return jnp.where(top_p < 1, top_p * sum_in_order(partition_sums(weights)), jnp.inf)


def _smallest(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], num_bits: int) -> jax.Array:
    """The smallest uint32 below 2^num_bits for which `holds`, which stays true once true and is true at the end."""

    def halve(i: jax.Array, low: jax.Array) -> jax.Array:
        half = jnp.uint32(1) << (jnp.uint32(num_bits - 1) - i.astype(jnp.uint32))
        return jnp.where(holds(low + (half - 1)), low, low + half)

    return lax.fori_loop(0, num_bits, halve, jnp.zeros(shape, jnp.uint32))


def _ordered_keys(x: jax.Array) -> jax.Array:
    """uint32 keys that compare as the f32 numbers do (no NaN)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered_keys(keys: jax.Array) -> jax.Array:
    """The f32 numbers of `_ordered_keys`; keys below that of -inf become -inf."""
    keys = jnp.maximum(keys, _ordered_keys(jnp.float32(-jnp.inf)))
    return lax.bitcast_convert_type(jnp.where(keys >> 31 == 1, keys ^ jnp.uint32(1 << 31), ~keys), jnp.float32)


def _fmix(h: jax.Array) -> jax.Array:
    """The murmur3 finaliser (Austin Appleby, public domain)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _expand(row: jax.Array, ndim: int) -> jax.Array:
    """[B] -> [B, 1, ...] of rank `ndim`."""
    return row.reshape(row.shape + (1,) * (ndim - 1))


def _pad_last(x: jax.Array, before: int, after: int) -> jax.Array:
    """Zeros before and after the last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(before, after)])


def _ids(scores: jax.Array) -> jax.Array:
    """Token ids [1, ..., V] int32 of the rank of `scores`."""
    return lax.broadcasted_iota(jnp.int32, (1,) * (scores.ndim - 1) + scores.shape[-1:], scores.ndim - 1)


def _is_integer(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x)


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple, np.ndarray))


def _per_row(
    field: str, value: Any, batch: int, is_kind: Callable[[Any], bool], in_range: Callable[[Any], bool], allowed: str
) -> list:
    """`value` as a list with one checked entry per row."""
    rows = list(value) if _is_list(value) else [value] * batch
    if len(rows) != batch:
        raise ValueError(f"{field} has {len(rows)} entries: expected one value or a list of batch = {batch}")
    for row, entry in enumerate(rows):
        if not is_kind(entry) or not in_range(entry):
            name = f"{field}[{row}]" if _is_list(value) else field
            raise ValueError(f"{name} = {entry!r}: expected {allowed}")
    return rows


def _floats(field: str, value: Any, batch: int, in_range: Callable[[Any], bool], allowed: str) -> np.ndarray:
    """As `_per_row`, as [batch] f32."""
    return np.asarray(_per_row(field, value, batch, _is_number, in_range, allowed), np.float32)
