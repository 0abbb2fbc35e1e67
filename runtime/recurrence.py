"""What a file says of its recurrent layers: which they are, and their sizes.

Owns: the metadata keys of short convolutions, delta nets and Mamba-2. Must not know: tensors, ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .errors import FileFormatError, UnsupportedError
from .metadata_keys import Keys

_MOST_TAPS = 64
_MOST_HEADS, _LONGEST_HEAD = 1 << 12, 1 << 12


@dataclass(frozen=True)
class Recurrence:
    """A value of Mamba-2 is x, a key B and a query C; heads of keys are its groups."""

    taps: int = 0  # rows that the causal convolution sees, its own included
    k_heads: int = 0
    v_heads: int = 0
    key_dim: int = 0
    head_dim: int = 0  # of values

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.k_heads * self.key_dim + self.v_heads * self.head_dim

    def state_values(self, dim: int) -> int:
        """Floats that one layer keeps of a sequence, whatever its length: the rows that the
        convolution still sees, and a matrix for every head of values."""
        matrices = self.v_heads * self.key_dim * self.head_dim
        return max(0, self.taps - 1) * (self.channels or dim) + matrices


NO_RECURRENCE = Recurrence()


def recurrent_layers(keys: Keys, n_layers: int, every: int) -> list[bool]:
    """Named one by one, or all but every n-th (0: no other than those without kv_heads)."""
    named = keys.get("attention.recurrent_layers", [])
    if named:
        if not isinstance(named, list) or len(named) != n_layers:
            raise FileFormatError(
                f"{keys.arch}.attention.recurrent_layers does not name {n_layers} layers"
            )
        return [bool(value) for value in named]
    every = keys.count("full_attention_interval", every)
    return [bool(every) and (n + 1) % every != 0 for n in range(n_layers)]


def _short_convolution(keys: Keys) -> Recurrence:
    return Recurrence(_bounded(keys, "shortconv.l_cache", 2, _MOST_TAPS))


def _with_heads(keys: Keys) -> Recurrence:
    k_heads = _bounded(keys, "ssm.group_count", 1, _MOST_HEADS)
    v_heads = _bounded(keys, "ssm.time_step_rank", 1, _MOST_HEADS)
    key_dim = _bounded(keys, "ssm.state_size", 1, _LONGEST_HEAD)
    if v_heads % k_heads:
        raise FileFormatError(f"{v_heads} value heads are not a multiple of {k_heads} key heads")
    inner = keys.count("ssm.inner_size", v_heads * key_dim)
    if inner % v_heads or not 1 <= inner // v_heads <= _LONGEST_HEAD:
        raise FileFormatError(
            f"{keys.arch}.ssm.inner_size is {inner}, expected up to {_LONGEST_HEAD} for each of "
            f"{v_heads} heads"
        )
    taps = _bounded(keys, "ssm.conv_kernel", 2, _MOST_TAPS)
    return Recurrence(taps, k_heads, v_heads, key_dim, inner // v_heads)


def _delta_net(keys: Keys) -> Recurrence:
    found = _with_heads(keys)
    if found.head_dim != found.key_dim:
        raise UnsupportedError(
            f"{keys.arch}.ssm.inner_size is {found.v_heads * found.head_dim}: values of other "
            f"sizes than keys, {found.key_dim}, are not supported"
        )
    return found


def _bounded(keys: Keys, key: str, least: int, most: int) -> int:
    value = keys.count(key)
    if not least <= value <= most:
        raise FileFormatError(f"{keys.arch}.{key} is {value}, expected {least} to {most}")
    return value


READERS: dict[str, Callable[[Keys], Recurrence]] = {
    "": lambda keys: NO_RECURRENCE,
    "short convolution": _short_convolution,
    "delta net": _delta_net,
    "Mamba-2": _with_heads,
}
