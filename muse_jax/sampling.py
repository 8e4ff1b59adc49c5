"""Choosing a token: noise that is a function of (seed, position, token id), filters, and one argmax.

A token is the argmax of score + Gumbel noise, which is a draw from softmax(score). The noise depends on nothing else, so
plain, speculative, batched and sharded decoding choose the same token for the same seed and prefix.

Only sums of probabilities round; maxima, top candidates, counts and first ids are exact however the vocabulary is split.
So the sums alone are bound to eight fixed vocabulary partitions added in order (`partition_sums`, `sum_in_order`), and
a device that holds some of the partitions forms the same bits as one that holds them all.

Logits are an array with the whole vocabulary, or a list of parts: with `Ranks`, part r of eight holds ids r W to r W + W - 1.
Parts stay where they are. What travels is each part's best tokens and sums, and the results are the same on every device.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from muse_jax.layout import NUM_RANKS
from muse_jax.sharding import Ranks

Logits = jax.Array | list[jax.Array]  # the whole vocabulary, or the parts of this device's ranks
UNCUT = Ranks()

NUM_CANDIDATES = 1024  # sorted best scores that top-k and top-p look at before they fall back to bisection

# 1 / T, or a logit times it, may overflow below this temperature, so create() takes it for 0.
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


def choose(logits: Logits, pos: jax.Array, params: SamplingParams, valid_vocab: int, ranks: Ranks = UNCUT) -> jax.Array:
    """The next token of every row.

    Args:     logits: [B, V] or [B, T, V] f32, after multiplier and softcap, finite or -inf; or the parts of this device's
              ranks, [B, W] or [B, T, W].  pos: [B] or [B, T] int32, absolute position of the token being chosen (n for the
              first one after a prompt of n tokens).  valid_vocab: static; ids from here on are padding and are never chosen.
    Returns:  [B] or [B, T] int32, ties to the lowest id. A row of NaN gives the last valid id.
    Raises:   ValueError if shapes, dtype or valid_vocab do not fit.
    """
    parts = _checked(logits, params, valid_vocab, ranks)
    if pos.shape != parts[0].shape[:-1]:
        raise ValueError(f"pos has shape {pos.shape}: expected that of logits without the vocabulary, {parts[0].shape[:-1]}")

    def best_of_part(scores: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        if params.mode != SamplingMode.GREEDY:
            ids = jnp.arange(scores.shape[-1], dtype=jnp.uint32) + first.astype(jnp.uint32)
            sampled = _expand(params.temperature, scores.ndim) > 0
            scores = jnp.where(sampled, scores + gumbel_noise(params.seed_lo, params.seed_hi, pos, ids), scores)
        return _best(scores, _ids(scores, first), valid_vocab - 1)

    best, ids = _gather_pairs(_filter(best_of_part, parts, params, valid_vocab, ranks), ranks)
    return (ids if ranks.count == 1 else _best(best, ids, valid_vocab - 1)[1])[..., 0]


def filter_scores(logits: Logits, params: SamplingParams, valid_vocab: int, ranks: Ranks = UNCUT) -> Logits:
    """Scores that `choose` adds noise to: logits times 1 / T, and -inf where padding or a filter drops the token.

    top-k, top-p and min-p follow transformers' warpers in that order, each on what the previous one left. Equal scores
    rank by id, so that of a tied group at the border of top-p the lowest ids stay (transformers leaves this open); top-k
    keeps all of them. Rows of temperature 0 are not scaled and not filtered.

    Args:     logits: as in `choose`.  valid_vocab: static, from 1 to V.
    Returns:  f32, in the form and shape of logits.
    Raises:   ValueError if shapes, dtype or valid_vocab do not fit.
    Source:   transformers 5.24.0, generation/logits_process.py.
    """
    parts = _checked(logits, params, valid_vocab, ranks)
    scores = _filter(lambda scores, first: scores, parts, params, valid_vocab, ranks)
    return scores if isinstance(logits, list) else scores[0]


def mask_padding(parts: list[jax.Array], valid_vocab: int, ranks: Ranks = UNCUT) -> list[jax.Array]:
    """The parts [..., W] f32 of this device's ranks with -inf for ids from `valid_vocab` on."""
    padding = _padding(parts, valid_vocab, ranks)
    if padding is None:
        return parts
    return ranks.run(functools.partial(_masked, padding=padding), parts, first_ids(parts, ranks))


def top_candidates(parts: list[jax.Array], k: int, ranks: Ranks = UNCUT) -> tuple[jax.Array, jax.Array]:
    """The largest numbers of the whole vocabulary, merged from those of each part.

    Args:     parts: of this device's ranks, [..., W] f32.  k: static, at most V.
    Returns:  values [..., k] f32, best first, and ids [..., k] int32; equal values by rising ids.
    """

    def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        # The barriers keep slices of the results from reaching the top-k: XLA for CPU would see a sort of the whole
        # vocabulary in it (15 x 3,072 logits on two cores: 6.6 ms against 0.1 ms, jax 0.10.2). One barrier for both would
        # make its partitioner fail.
        values, places = lax.top_k(x, k)
        return lax.optimization_barrier(values), lax.optimization_barrier(places)

    def top_of_part(part: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, places = top_k(part, min(k, part.shape[-1]))
        return values, first + places

    values, ids = _gather_pairs(ranks.run(top_of_part, parts, first_ids(parts, ranks)), ranks)
    if ranks.count > 1:
        # Parts side by side are in the order of ids wherever values are equal.
        values, places = top_k(values, k)
        ids = jnp.take_along_axis(ids, places, axis=-1)
    return values, ids


def first_ids(parts: list[jax.Array], ranks: Ranks) -> list[jax.Array]:
    """The first token id of each part, int32 scalars."""
    return [ranks.index(i) * parts[0].shape[-1] for i in range(ranks.local)]


def partition_sums(x: jax.Array, count: int = NUM_RANKS) -> jax.Array:
    """[..., V] -> [..., count]: the sum of each of `count` partitions, of which the last is padded with zeros.

    The tree of additions is written out: XLA orders a reduction by the shape and the fusion it finds it in.
    """
    size = -(-x.shape[-1] // count)
    x = _pad_last(x, 0, size * count - x.shape[-1]).reshape(*x.shape[:-1], count, size)
    width = 1 << (size - 1).bit_length()
    x = _pad_last(x, 0, width - size)
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def sum_in_order(partials: jax.Array) -> jax.Array:
    """[..., 8] -> [..., 1]: partial sums added from partition 0 to partition 7."""
    return functools.reduce(jnp.add, jnp.split(partials, NUM_RANKS, axis=-1))


def ordered_sum(function: Callable[..., jax.Array], ranks: Ranks, *args: Any) -> jax.Array:
    """The sum of `function` of each part over the whole vocabulary, [..., 1]; arguments as `Ranks.run` takes them."""
    partials = ranks.run(lambda *args: partition_sums(function(*args), NUM_RANKS // ranks.count), *args)
    return sum_in_order(ranks.gather(partials, axis=-1))


def _checked(logits: Logits, params: SamplingParams, valid_vocab: int, ranks: Ranks) -> list[jax.Array]:
    """The logits as a list of parts."""
    parts = logits if isinstance(logits, list) else [logits]
    if len(parts) != ranks.local or any(part.shape != parts[0].shape for part in parts):
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise ValueError(f"logits are of shapes {shapes}: expected {ranks.local} of one shape, one for each of the ranks here")
    batch, vocab = params.temperature.shape, ranks.count * parts[0].shape[-1]
    for part in parts:
        if part.ndim not in (2, 3) or part.shape[:1] != batch or part.dtype != jnp.float32:
            raise ValueError(
                f"logits are {part.dtype}{list(part.shape)}: expected float32 [B, V] or [B, T, V] with B = {batch[0]}"
            )
    if not 1 <= valid_vocab <= vocab:
        raise ValueError(f"valid_vocab = {valid_vocab}: expected an integer from 1 to V = {vocab}")
    return parts


def _padding(parts: list[jax.Array], valid_vocab: int, ranks: Ranks) -> int | None:
    """The first id of padding; None without any."""
    return valid_vocab if valid_vocab < ranks.count * parts[0].shape[-1] else None


def _masked(part: jax.Array, first: jax.Array, padding: int) -> jax.Array:
    return jnp.where(_ids(part, first) < padding, part, -jnp.inf)


def _best(scores: jax.Array, ids: jax.Array, otherwise: int) -> tuple[jax.Array, jax.Array]:
    """The best score [..., 1] and the lowest of its ids [..., 1]; `otherwise` for NaN."""
    # Two reductions in place of jnp.argmax: XLA for CPU evaluates what it fuses into an argmax one number at a time
    # (V = 202,048 with noise, two cores: 11.0 ms against 1.5 ms, jax 0.10.2).
    best = jnp.max(scores, axis=-1, keepdims=True)
    return best, jnp.min(jnp.where(scores == best, ids, otherwise), axis=-1, keepdims=True)


def _gather_pairs(pairs: list[tuple[jax.Array, jax.Array]], ranks: Ranks) -> tuple[jax.Array, jax.Array]:
    """f32 values and int32 ids of all parts side by side, on every device; both travel at once. [..., n] each."""
    if ranks.count == 1:
        return pairs[0]
    packed = [jnp.stack([lax.bitcast_convert_type(values, jnp.int32), ids], axis=-2) for values, ids in pairs]
    packed = ranks.gather(packed, axis=-1)
    return lax.bitcast_convert_type(packed[..., 0, :], jnp.float32), packed[..., 1, :]


class _Border(NamedTuple):
    """The last token that top-k and top-p keep, in the order of falling scores and, among equals, rising ids."""

    score: jax.Array  # [..., 1] f32
    last_id: jax.Array  # [..., 1] int32; V - 1 where all tokens of that score stay
    top: jax.Array  # [..., 1] f32, the best score


def _filter(function: Callable, parts: list[jax.Array], params: SamplingParams, valid_vocab: int, ranks: Ranks) -> list:
    """`function` of the filtered scores and the first id of each part."""
    firsts, padding = first_ids(parts, ranks), _padding(parts, valid_vocab, ranks)
    inverse = _inverse_temperature(params, parts[0].ndim)

    def scale(logits: jax.Array, first: jax.Array, inverse: jax.Array | None) -> jax.Array:
        scores = logits if padding is None else _masked(logits, first, padding)
        if inverse is None:
            return scores
        scores = scores * inverse
        # -0.0 sorts below 0.0 but equals it. This choice also keeps XLA from contracting the product with a sum.
        return jnp.where(scores == 0, 0.0, scores)

    if params.mode != SamplingMode.FILTERED:
        return ranks.run(lambda logits, first, inverse: function(scale(logits, first, inverse), first), parts, firsts, inverse)

    def drop(scores: jax.Array, first: jax.Array, border: _Border) -> Any:
        min_p = _where_sampled(params, params.min_p, 0.0, scores.ndim)
        dropped = (scores < border.score) | ((scores == border.score) & (_ids(scores, first) > border.last_id))
        dropped |= jnp.exp(scores - border.top) < min_p
        return function(jnp.where(dropped, -jnp.inf, scores), first)

    scores = ranks.run(scale, parts, firsts, inverse)
    return ranks.run(drop, scores, firsts, _border(scores, params, ranks))


def _inverse_temperature(params: SamplingParams, ndim: int) -> jax.Array | None:
    """[B, 1, ...] of rank `ndim`; 1 where the temperature is 0, None where it is 0 everywhere."""
    if params.mode == SamplingMode.GREEDY:
        return None
    # XLA for CPU would replace some divisions of parts by the temperature with products, and not others (jax 0.10.2). The
    # smallest normal number, because a smaller one may count as 0, and 0 times -inf is NaN.
    inverse = 1.0 / _where_sampled(params, params.temperature, 1.0, ndim)
    return jnp.maximum(inverse, jnp.finfo(jnp.float32).tiny)


def _where_sampled(params: SamplingParams, setting: jax.Array, otherwise: float, ndim: int) -> jax.Array:
    """A setting of rows whose temperature is above 0, [B, 1, ...] of rank `ndim`."""
    return _expand(jnp.where(params.temperature > 0, setting, jnp.asarray(otherwise, setting.dtype)), ndim)


def _border(scores: list[jax.Array], params: SamplingParams, ranks: Ranks) -> _Border:
    """scores: parts [..., W] f32 without -0.0."""
    ndim, vocab = scores[0].ndim, ranks.count * scores[0].shape[-1]
    top_k = _where_sampled(params, jnp.where(params.top_k < vocab, params.top_k, 0), 0, ndim)
    top_p = _where_sampled(params, params.top_p, 1.0, ndim)

    best, best_ids = top_candidates(scores, min(NUM_CANDIDATES, vocab), ranks)
    # Of the whole, XLA for CPU finds the maximum beside the top-k and goes on from it.
    top = jnp.max(scores[0], axis=-1, keepdims=True) if ranks.count == 1 else best[..., :1]
    kth = jnp.take_along_axis(best, jnp.clip(top_k - 1, 0, best.shape[-1] - 1), axis=-1)
    floor = jnp.where(top_k > 0, kth, -jnp.inf)
    limit = _mass_limit(ordered_sum(_weights, ranks, scores, floor, top), top_p)
    mass = jnp.cumsum(_weights(best, floor, top), axis=-1)
    mass_before = _pad_last(mass[..., :-1], 1, 0)
    num_kept = jnp.sum((mass_before < limit) & (best >= floor), axis=-1, keepdims=True, dtype=jnp.int32)
    last = jnp.maximum(num_kept, 1) - 1
    score = jnp.where(top_p < 1, jnp.take_along_axis(best, last, axis=-1), floor)
    last_id = jnp.where(top_p < 1, jnp.take_along_axis(best_ids, last, axis=-1), vocab - 1)

    beyond = (top_k > best.shape[-1]) | ((top_p < 1) & (mass[..., -1:] < limit))

    def bisect() -> tuple[jax.Array, jax.Array]:
        exact_score, exact_id = _border_by_bisection(scores, top, top_k, top_p, ranks)
        # Row by row, so that a row's choice does not depend on its neighbours in the batch.
        return jnp.where(beyond, exact_score, score), jnp.where(beyond, exact_id, last_id)

    # Every device has the same `beyond`, so all or none of them exchange sums.
    return _Border(*lax.cond(jnp.any(beyond), bisect, lambda: (score, last_id)), top)


def _border_by_bisection(
    scores: list[jax.Array], top: jax.Array, top_k: jax.Array, top_p: jax.Array, ranks: Ranks
) -> tuple[jax.Array, jax.Array]:
    """Score and id of `_border` for any border, from passes over all scores that count or sum; nothing is sorted.

    top_k: [..., 1] int32 below V, 0: off.  top_p: [..., 1] f32, 1: off.
    """
    firsts, keys = first_ids(scores, ranks), ranks.run(_ordered_keys, scores)

    def smallest_score(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return _from_ordered_keys(_smallest(holds, top.shape, num_bits=32))

    def count(mask: Callable[..., jax.Array], *args: Any) -> jax.Array:
        return ranks.count_sum(ranks.run(lambda *args: jnp.sum(mask(*args), axis=-1, keepdims=True, dtype=jnp.int32), *args))

    floor = jnp.where(top_k > 0, smallest_score(lambda key: count(jnp.greater, keys, key) < top_k), -jnp.inf)
    weights = ranks.run(_weights, scores, floor, top)

    def mass_above(key: jax.Array) -> jax.Array:
        return ordered_sum(lambda weights, keys, key: jnp.where(keys > key, weights, 0.0), ranks, weights, keys, key)

    limit = _mass_limit(ordered_sum(lambda weights: weights, ranks, weights), top_p)
    score = jnp.maximum(floor, smallest_score(lambda key: mass_above(key) < limit))
    key = _ordered_keys(score)
    # Token j of the tied ones, each of weight w, stays while mass_above(key) + j w < limit: always, if top-p is off.
    num_tied = jnp.ceil((limit - mass_above(key)) / jnp.exp(score - top))
    num_tied = jnp.minimum(num_tied, count(jnp.equal, keys, key).astype(jnp.float32)).astype(jnp.int32)

    def tied_up_to(keys: jax.Array, first: jax.Array, key: jax.Array, last_id: jax.Array) -> jax.Array:
        return (keys == key) & (_ids(keys, first) <= last_id)

    last_id = _smallest(
        lambda i: count(tied_up_to, keys, firsts, key, i.astype(jnp.int32)) >= num_tied,
        top.shape,
        num_bits=(ranks.count * scores[0].shape[-1]).bit_length(),
    )
    return score, last_id.astype(jnp.int32)


def _weights(scores: jax.Array, floor: jax.Array, top: jax.Array) -> jax.Array:
    """Unnormalised probabilities of the scores from `floor` up; 0, not NaN, for -inf in a row of nothing else."""
    return jnp.where((scores >= floor) & (scores > -jnp.inf), jnp.exp(scores - top), 0.0)


def _mass_limit(total: jax.Array, top_p: jax.Array) -> jax.Array:
    """top-p keeps a token while the weights before it sum to less than this. All [..., 1]."""
    return jnp.where(top_p < 1, top_p * total, jnp.inf)


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


def _ids(part: jax.Array, first: jax.Array) -> jax.Array:
    """Token ids [1, ..., W] int32 of a part [..., W] that begins with id `first`."""
    return first + lax.broadcasted_iota(jnp.int32, (1,) * (part.ndim - 1) + part.shape[-1:], part.ndim - 1)


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
