"""XXH3-128 of many pieces of memory in one call, without the interpreter's lock.

The library `xxhash` has the same digests and is as fast, one piece at a time. Sixteen threads that
ask for the lock after every piece spend most of their time waiting for it.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.extending import intrinsic

from dare.kernels.kept import numba_folder

u32, u64 = np.uint32, np.uint64


def jit(**options):
    """Make Numba's decorator, with a cache where only this user can write, or none."""
    place = numba_folder()

    def compiled(function):
        dispatcher = njit(**options)(function)
        if place:
            before, config.CACHE_DIR = config.CACHE_DIR, place
            try:
                dispatcher.enable_caching()
            finally:
                config.CACHE_DIR = before
        return dispatcher

    return compiled


kernel = jit(nogil=True, error_model="numpy")
helper = jit(nogil=True, inline="always")

STRIPE, STRIPES = 64, 16
"""Bytes that are taken at a time, and how often between two scrambles."""
BLOCK = STRIPE * STRIPES

PRIME32 = (u64(0x9E3779B1), u64(0x85EBCA77), u64(0xC2B2AE3D))
PRIME64 = (
    *(u64(0x9E3779B185EBCA87), u64(0xC2B2AE3D27D4EB4F), u64(0x165667B19E3779F9)),
    *(u64(0x85EBCA77C2B2AE63), u64(0x27D4EB2F165667C5)),
)
FIRST, SECOND = PRIME64[:2]
SCRAMBLING, AVALANCHE = PRIME32[0], u64(0x165667919E3779F9)
START = (
    *(PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2]),
    *(PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0]),
)
HALF, ALL = u64(32), u64(0xFFFFFFFF)
SCRAMBLE, LOW, HIGH = 0, 8, 16
"""Where the words of the secret for each use begin, in the array of words."""
LAST_STRIPE = 192 - STRIPE - 7
"""Where in the secret that for the last bytes begins."""

_wide = ir.VectorType(ir.IntType(64), 8)


def _take(count):
    """An intrinsic that takes so many stripes into the eight sums at an address."""

    @intrinsic
    def take(_typing, sums, data, secret):
        def build(_context, builder, _signature, arguments):
            def pointer(address, offset):
                place = builder.add(address, ir.IntType(64)(offset))
                return builder.inttoptr(place, _wide.as_pointer())

            def splat(value):
                return ir.Constant(_wide, [value] * 8)

            sums, data, secret = arguments
            total = builder.load(pointer(sums, 0), align=8)
            for number in range(count):
                values = builder.load(pointer(data, STRIPE * number), align=1)
                keyed = builder.xor(values, builder.load(pointer(secret, 8 * number), align=1))
                low = builder.and_(keyed, splat(0xFFFFFFFF))
                product = builder.mul(low, builder.lshr(keyed, splat(32)))
                swapped = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
                others = builder.shuffle_vector(values, ir.Constant(_wide, ir.Undefined), swapped)
                total = builder.add(total, builder.add(others, product))
            builder.store(total, pointer(sums, 0), align=8)
            return ir.Constant(ir.IntType(8).as_pointer(), None)

        return types.none(types.intp, types.intp, types.intp), build

    return take


take_block, take_stripe = _take(STRIPES), _take(1)


@helper
def folded(left, right):
    """The product of two words, its upper half on its lower one."""
    a, b = u64(left >> HALF), u64(left & ALL)
    c, d = u64(right >> HALF), u64(right & ALL)
    lowest = u64(b * d)
    middle = u64(u64(a * d) + u64(lowest >> HALF))
    other = u64(u64(b * c) + u64(middle & ALL))
    high = u64(u64(a * c) + u64(u64(middle >> HALF) + u64(other >> HALF)))
    low = u64(u64(other << HALF) | u64(lowest & ALL))
    return u64(high ^ low)


@helper
def joined(sums, words, first, start):
    result = start
    for i in range(0, 8, 2):
        left = u64(sums[i] ^ words[first + i])
        right = u64(sums[i + 1] ^ words[first + i + 1])
        result = u64(result + folded(left, right))
    result = u64(u64(result ^ u64(result >> u64(37))) * AVALANCHE)
    return u64(result ^ u64(result >> HALF))


@kernel
def digest_pieces(addresses, sizes, secret, words, out):
    """Digest pieces of more than 240 bytes each: upper and lower half."""
    sums = np.empty(8, u64)
    place, keys = sums.ctypes.data, secret.ctypes.data
    for number in range(addresses.size):
        address, size = addresses[number], sizes[number]
        for i in range(8):
            sums[i] = START[i]
        blocks = (size - 1) // BLOCK
        for block in range(blocks):
            take_block(place, address + BLOCK * block, keys)
            for i in range(8):
                value = u64(u64(sums[i] ^ u64(sums[i] >> u64(47))) ^ words[SCRAMBLE + i])
                sums[i] = u64(value * SCRAMBLING)
        rest = address + BLOCK * blocks
        for stripe in range((size - 1 - BLOCK * blocks) // STRIPE):
            take_stripe(place, rest + STRIPE * stripe, keys + 8 * stripe)
        take_stripe(place, address + size - STRIPE, keys + LAST_STRIPE)
        out[number, 0] = joined(sums, words, HIGH, ~u64(u64(size) * SECOND))
        out[number, 1] = joined(sums, words, LOW, u64(u64(size) * FIRST))
