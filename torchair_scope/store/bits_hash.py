"""A hash of the exact bits of a tensor; docs/statistics.md defines it.

Bytes are mixed with those a few places after them, and taken as words of 8 bytes. A block is a
period of the weights of words: its sum of weighed words has a factor of its own in the hash.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import torch

from torchair_scope.store import native

PERIOD = 1 << 15  # words
_DISTANCE = 5
_FACTOR = 1 << 32
_BLOCK = 8 * PERIOD
_CHUNK = _BLOCK << 8
_WRAP = (1 << 64) - 1


def hash_on_cpu(data: torch.Tensor) -> int:
    """The hash of bytes in a row, on a CPU."""
    hashed = native.bits_hash(data, _weights(), _DISTANCE)
    if hashed is not None:
        return hashed
    blocks = enumerate(_blocks(data))
    return sum(_hash_of_block(*block) * _odd(_FACTOR + number) for number, block in blocks) & _WRAP


def hash_on_device(data: torch.Tensor) -> torch.Tensor:
    """The hash of bytes in a row, where they are: a scalar of int64 that has its bits."""
    weights = _weights(str(data.device))
    hashed = torch.zeros((), dtype=torch.int64, device=data.device)
    for first in range(0, data.numel(), _CHUNK):
        block, others = data[first : first + _CHUNK], data[first + _DISTANCE :]
        others = others[:_CHUNK]
        periods = -(-block.numel() // _BLOCK)
        mixed = torch.zeros(periods * _BLOCK, dtype=torch.uint8, device=data.device)
        _mix(block, others, mixed)
        factors = [_signed(_odd(_FACTOR + first // _BLOCK + period)) for period in range(periods)]
        products = (mixed.view(torch.int64).view(periods, PERIOD) * weights).sum(dim=1)
        hashed += (products * torch.tensor(factors, device=data.device)).sum()
    return hashed


def _blocks(data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of each block, and the bytes that these are mixed with."""
    if not data.numel():
        return iter(())
    # The last block may be too short for there to be another one.
    there = itertools.chain(torch.split(data[_DISTANCE:], _BLOCK), [data[:0]])
    return zip(torch.split(data, _BLOCK), there, strict=False)


def _hash_of_block(here: torch.Tensor, there: torch.Tensor) -> int:
    words = -(-here.numel() // 8)
    mixed = torch.empty(8 * words, dtype=torch.uint8)
    _mix(here, there, mixed)
    return int(torch.dot(mixed.view(torch.int64), _weights()[:words]))


def _mix(here: torch.Tensor, there: torch.Tensor, mixed: torch.Tensor) -> None:
    """Mix each byte with the one that stands for it `there`; pad with zeros."""
    size, paired = here.numel(), there.numel()
    torch.bitwise_xor(here[:paired], there, out=mixed[:paired])
    mixed[paired:size] = here[paired:]
    mixed[size:] = 0


def _odd(number: int) -> int:
    """The number's output of the generator splitmix64, made odd."""
    state = (number + 1) * 0x9E3779B97F4A7C15 & _WRAP
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WRAP
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _WRAP
    return state ^ state >> 31 | 1


@functools.cache
def _weights(device: str = "cpu") -> torch.Tensor:
    """The weights of the words of a period."""
    words = np.array([_odd(number) for number in range(PERIOD)], dtype=np.uint64)
    return torch.from_numpy(words.view(np.int64)).to(device)


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)
