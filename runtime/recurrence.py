"""What a file says of its recurrent layers: which they are, and their sizes.

Owns: the metadata keys of short convolutions and delta nets. Must not know: tensors, ops.
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
    taps: int = 0  # rows that the causal convolution sees, its own included
    k_heads: int = 0
    v_heads: int = 0
    head_dim: int = 0  # of keys and of values

    def state_values(self, dim: int) -> int:
        """Floats that one layer keeps of a sequence, whatever its length: the rows that the
        convolution still sees, and a matrix for every head of values."""
        channels = (2 * self.k_heads + self.v_heads) * self.head_dim or dim
        return max(0, self.taps - 1) * channels + self.v_heads * self.head_dim**2


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


def _delta_net(keys: Keys) -> Recurrence:
    found = Recurrence(
        taps=_bounded(keys, "ssm.conv_kernel", 2, _MOST_TAPS),
        k_heads=_bounded(keys, "ssm.group_count", 1, _MOST_HEADS),
        v_heads=_bounded(keys, "ssm.time_step_rank", 1, _MOST_HEADS),
        head_dim=_bounded(keys, "ssm.state_size", 1, _LONGEST_HEAD),
    )
    if found.v_heads % found.k_heads:
        raise FileFormatError(
            f"{found.v_heads} value heads are not a multiple of {found.k_heads} key heads"
        )
    inner = keys.count("ssm.inner_size", found.v_heads * found.head_dim)
    if inner != found.v_heads * found.head_dim:
        raise UnsupportedError(
            f"{keys.arch}.ssm.inner_size is {inner}: values of other sizes than keys, "
            f"{found.head_dim}, are not supported"
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
}
