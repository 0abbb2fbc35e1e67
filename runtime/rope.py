"""Rotary frequencies: plain, linear, YaRN and longrope scaling, and the keys they come from.

Must not know which architecture asks. Formulas: the YaRN paper (arXiv 2309.00071), and LongRoPE
(arXiv 2402.13753) as Phi 3 has it: two lists of divisors, for short and for long contexts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .errors import FileFormatError, UnsupportedError
from .metadata_keys import Keys

_SCALINGS = ("none", "linear", "yarn", "longrope")
FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
DIVISOR_TENSORS = (FREQS, LONG_FACTORS, SHORT_FACTORS)


@dataclass(frozen=True)
class Yarn:
    """Fast dims keep their angles, slow ones are stretched by the factor, a ramp lies between."""

    original_context: int
    beta_fast: float = 32.0  # turns within the original context, above which angles are kept
    beta_slow: float = 1.0  # turns below which they are stretched
    ext_factor: float = 1.0  # 0: all dims are stretched
    is_exact: bool = False  # the ends of the ramp are not rounded to whole dims

    def kept_share(self, base: float, n_rot: int) -> np.ndarray:
        """float64 (n_rot / 2): 1 where an angle is kept, 0 where it is stretched."""
        low = self._dim_of(self.beta_fast, base, n_rot)
        high = self._dim_of(self.beta_slow, base, n_rot)
        if not self.is_exact:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, n_rot - 1)
        ramp = (np.arange(n_rot // 2) - low) / max(0.001, high - low)
        return (1 - np.clip(ramp, 0, 1)) * self.ext_factor

    def _dim_of(self, turns: float, base: float, n_rot: int) -> float:
        """The dim whose angle makes this many turns within the original context."""
        wavelength = self.original_context / (turns * 2 * math.pi)
        return n_rot * math.log(wavelength) / (2 * math.log(base))


@dataclass(frozen=True)
class Rope:
    """angle_i = position * base^(-2i / n_rot) / factor; YaRN exempts the fast dims."""

    base: float
    n_rot: int
    factor: float = 1.0
    yarn: Yarn | None = None
    amplitude: float = 1.0  # cos and sin are multiplied by it
    divisors: str = FREQS  # tensor of further divisors, one a pair, where the file has it
    short_context: int = 0  # > 0: two such tensors, the long one for contexts beyond this

    def at_context(self, n_tokens: int) -> Rope:
        if not self.short_context:
            return self
        is_long = n_tokens > self.short_context
        return replace(self, divisors=LONG_FACTORS if is_long else SHORT_FACTORS)

    def inv_freq(self, divisors: np.ndarray | None = None) -> np.ndarray:
        """float64 (n_rot / 2); `divisors` are those of the file."""
        exponents = np.arange(0, self.n_rot, 2, dtype=np.float64) / self.n_rot
        plain: np.ndarray = self.base**-exponents
        if divisors is not None:
            plain = plain / divisors.astype(np.float64)
        stretched = plain / self.factor
        if self.yarn is None:
            return stretched
        kept = self.yarn.kept_share(self.base, self.n_rot)
        return stretched * (1 - kept) + plain * kept

    def __str__(self) -> str:
        scaling = "" if self.factor == 1 else f"_{'yarn' if self.yarn else 'by'}_{self.factor:g}"
        if self.short_context:
            scaling = "_long" if self.divisors == LONG_FACTORS else "_short"
        return f"rope_{self.base:g}{scaling}"


@dataclass(frozen=True)
class RopeRules:
    """What an architecture and the tensors of a file say beside its keys."""

    local_base: float | None = None  # the architecture's own base of local layers
    plain_local: bool = False  # local layers are never scaled
    has_two_lists: bool = False  # the file has longrope's divisors
    grows_queries: bool = False  # not cos and sin grow where a file names YaRN's multiplier
    exact_yarn: bool = False  # the ends of its ramp are not rounded


def read_rope(keys: Keys, head_dim: int, rules: RopeRules, *, is_local: bool) -> Rope:
    """The rope of a layer."""
    base = keys.number("rope.freq_base", 10000.0)
    n_rot = keys.count("rope.dimension_count", head_dim)
    if is_local:
        n_rot = keys.count("rope.dimension_count_swa", min(n_rot, head_dim))
        base = keys.number("rope.freq_base_swa", rules.local_base or base)
    if n_rot % 2 or not 0 < n_rot <= head_dim:
        raise FileFormatError(
            f"{keys.arch}.rope.dimension_count is {n_rot}, expected an even number up to {head_dim}"
        )
    if base <= 1:
        raise FileFormatError(f"{keys.arch}.rope.freq_base is {base:g}, expected more than 1")
    if is_local and rules.plain_local:  # only layers that look far back are stretched
        return Rope(base, n_rot, divisors="")
    if rules.has_two_lists:
        return _longrope(keys, base, n_rot)
    return _scaled(keys, base, n_rot, rules)


def original_context(keys: Keys) -> int:
    """Tokens of the context before it was extended."""
    return keys.count("rope.scaling.original_context_length", keys.count("context_length"))


def _longrope(keys: Keys, base: float, n_rot: int) -> Rope:
    original, context = original_context(keys), keys.count("context_length")
    if original < 2:  # whose logarithm divides
        raise FileFormatError(
            f"{keys.arch}.rope.scaling.original_context_length is {original}, expected 2 or more"
        )
    grown = max(context / original, 1.0)
    amplitude = math.sqrt(1 + math.log(grown) / math.log(original))
    amplitude = keys.scale("rope.scaling.attn_factor", amplitude)
    return Rope(base, n_rot, amplitude=amplitude, divisors=SHORT_FACTORS, short_context=original)


def _scaled(keys: Keys, base: float, n_rot: int, rules: RopeRules) -> Rope:
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in _SCALINGS:
        raise UnsupportedError(
            f"rope scaling {kind!r} is not supported; supported: {', '.join(_SCALINGS)}"
        )
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    if factor < 0:
        raise FileFormatError(f"{keys.arch}.rope.scaling.factor is {factor:g}, expected 0 or more")
    if kind == "longrope":
        raise FileFormatError(f"rope scaling is longrope, but tensor {LONG_FACTORS!r} is missing")
    if kind == "none" or factor == 1:
        return Rope(base, n_rot)
    if kind == "linear":
        return Rope(base, n_rot, factor)
    yarn = replace(_yarn(keys), is_exact=rules.exact_yarn)
    amplitude = keys.number("rope.scaling.attn_factor", 1.0)
    amplitude *= keys.number("rope.scaling.yarn_attn_factor", 1.0)
    # Models whose training cancelled a part of that growth name the part.
    cancelled = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if not (rules.grows_queries and cancelled):
        amplitude *= _yarn_growth(factor) / _yarn_growth(factor, cancelled)
    return Rope(base, n_rot, factor, yarn, amplitude)


def yarn_query_scale(keys: Keys) -> float:
    """What queries and keys each grow by with the context, where a file tells the multiplier, which
    already includes the 0.1 that others multiply by it."""
    factor = keys.number("rope.scaling.factor", 0.0)
    is_yarn = keys.get("rope.scaling.type", "none") == "yarn" and factor > 1
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    return 1 + multiplier * math.log(factor) if is_yarn else 1.0


def _yarn_growth(factor: float, share: float = 1.0) -> float:
    return 1 + 0.1 * share * math.log(factor) if factor > 1 else 1.0


def _yarn(keys: Keys) -> Yarn:
    yarn = Yarn(
        original_context(keys),
        keys.number("rope.scaling.yarn_beta_fast", Yarn.beta_fast),
        keys.number("rope.scaling.yarn_beta_slow", Yarn.beta_slow),
        keys.number("rope.scaling.yarn_ext_factor", Yarn.ext_factor),
    )
    if min(yarn.original_context, yarn.beta_fast, yarn.beta_slow) <= 0:
        raise FileFormatError(f"{keys.arch}.rope.scaling: {yarn}, expected numbers above 0")
    return yarn
