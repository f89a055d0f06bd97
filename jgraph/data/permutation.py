"""A shuffle that is never stored: where each of n things comes, computed from its number.

A Feistel network over the bits of a number is a permutation whatever its round function is, and looks like one drawn at random
if that function does (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988). What
it sends beyond n is sent on until it is below n: cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002), here less than one step more on average.
"""

from dataclasses import dataclass, field

import numpy as np

# Even, so that the two parts of a number of odd length are back in their places.
_ROUNDS = 6
# With fewer, some orders of ten things are clearly more frequent than others.
_FEWEST_BITS = 8
# Two odd constants of 64 bits whose bits look random: the fractions of the golden ratio and of the square root of 3.
_GOLDEN, _ROOT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


@dataclass(frozen=True, eq=False)
class Permutation:
    """A permutation of range(size): `permutation(places)`.

    Attributes:
        size: at least 1.
        bits: source of the keys, one a round; the same one gives the same permutation, with any version of numpy (NEP 19).
    """

    size: int
    bits: np.random.Philox
    keys: np.ndarray = field(init=False, repr=False)

    def __post_init__(self):
        assert self.size >= 1
        # Drawn now: whoever draws from the same bits later gets others.
        object.__setattr__(self, "keys", self.bits.random_raw(_ROUNDS))

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Returns which number is at each of the 1-D places, int64, all in [0, size)."""
        found = self._walk(places.astype(np.uint64))
        beyond = np.flatnonzero(found >= self.size)
        while len(beyond):
            again = self._walk(found[beyond])
            found[beyond] = again
            beyond = beyond[again >= self.size]
        return found.astype(np.int64)

    def _walk(self, numbers: np.ndarray) -> np.ndarray:
        num_bits = max(_FEWEST_BITS, (self.size - 1).bit_length())
        low_bits = num_bits // 2
        widths = np.array([num_bits - low_bits, low_bits], np.uint64)
        high, low = numbers >> widths[1], numbers & ((np.uint64(1) << widths[1]) - np.uint64(1))
        for index, key in enumerate(self.keys):
            mixed = (low + key) * _GOLDEN
            mixed ^= mixed >> np.uint64(32)
            mixed *= _ROOT
            # The upper bits of a product depend on all bits of its factors.
            mixed >>= np.uint64(64) - widths[index % 2]
            high, low = low, high ^ mixed
        return high << widths[1] | low
