"""One uniform number for each (seed, position): counter-based, so no generator has a history.

A token's draw therefore never depends on batch mates, preemption, the replica, or how many numbers were drawn before.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) of 53 random bits.

    SplitMix64 (Steele, Lea and Flood 2014) read at index ``position`` of the stream that starts at the mixed seed;
    mixing the seed keeps neighbouring seeds from being shifted copies of each other.
    """
    with np.errstate(over="ignore"):
        counter = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return (_mix(counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
