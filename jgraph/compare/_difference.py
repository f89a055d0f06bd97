"""The difference between the results of two programs."""

import math
from dataclasses import dataclass

import jax
import numpy as np

from jgraph.tree import leaf_names
from jgraph.types import Tree


@dataclass(frozen=True)
class Difference:
    """The difference between two results of `compare`. `str` formats it in one line.

    Attributes:
        is_bitwise_equal: True if all arrays have the same dtypes and bits.
        absolute: Largest |f - g|. None if it is not finite, or the results were not compared.
        relative: Largest quotient of |f - g| and the largest magnitude in its array. None as `absolute`.
        leaf: Name of the array with the largest relative difference, e.g. `0/w`. "" if all are equal, or there is one array.
        mismatch: The reason why the results were not compared. "" if they were.
    """

    is_bitwise_equal: bool
    absolute: float | None = None
    relative: float | None = None
    leaf: str = ""
    mismatch: str = ""

    def __str__(self) -> str:
        if self.mismatch:
            return f"not compared, because {self.mismatch}; `result` of jgraph.Program selects the part to compare"
        if self.is_bitwise_equal:
            return "bitwise equal"
        where = f" in {self.leaf}" if self.leaf else ""
        if self.absolute is None or self.relative is None:
            return f"NaN or infinity in one of them{where}"
        if self.absolute == 0:
            return "equal values, but other dtypes, signs of zeros or kinds of NaN"
        # Each may be of another array.
        return (
            f"largest difference {self.absolute:.3g}; at most {self.relative:.3g} of the largest magnitude in its array{where}"
        )


def difference(f: Tree, g: Tree, names: tuple[str, str]) -> Difference:
    """Compares trees of NumPy arrays. `names` are those of the programs, for the mismatch."""
    first, second = map(_arrays, (f, g))
    if len(first) == len(second) == 1:
        # A loss has another name in the result of each program.
        second = dict(zip(first, second.values(), strict=True))
    if mismatch := _mismatch(first, second, names):
        return Difference(False, mismatch=mismatch)
    is_bitwise_equal = all(a.dtype == second[name].dtype and a.tobytes() == second[name].tobytes() for name, a in first.items())
    gaps = {name: _gap(a, second[name]) for name, a in first.items()}
    leaf = max(gaps, key=lambda name: gaps[name][1], default="")
    absolute = max((gap for gap, _ in gaps.values()), default=0.0)
    relative = gaps[leaf][1] if gaps else 0.0
    return Difference(
        is_bitwise_equal,
        absolute if math.isfinite(absolute) else None,
        relative if math.isfinite(relative) else None,
        leaf if len(gaps) > 1 and absolute > 0 else "",
    )


def _arrays(tree: Tree) -> dict[str, np.ndarray]:
    """Returns the arrays and numbers of a tree by name. Modules of Equinox also have functions as leaves."""
    arrays = dict[str, np.ndarray]()
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        array = np.asarray(leaf)
        if array.dtype.kind not in "OUS":
            # The keys "a/b", and "a" with "b" in it, have one name.
            while name in arrays:
                name += "'"
            arrays[name] = array
    return arrays


def _mismatch(first: dict[str, np.ndarray], second: dict[str, np.ndarray], names: tuple[str, str]) -> str:
    """Describes the first array that cannot be compared. "" if there is none."""
    for (name, found), (other, known) in (((names[0], first), (names[1], second)), ((names[1], second), (names[0], first))):
        if missing := [leaf for leaf in found if leaf not in known]:
            return f"{name} returns {missing[0] or 'one array'}, which {other} does not return"
    for leaf, a in first.items():
        if a.shape != second[leaf].shape:
            return f"{leaf or 'the array'} has shape {list(a.shape)} and {list(second[leaf].shape)}"
    return ""


def _gap(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Returns the largest difference of two arrays, and its quotient with the largest magnitude. Infinite for NaN in one."""
    # Integers of 64 bits have more digits than a float64.
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.longdouble if a.dtype.kind in "iu" else np.float64
    x, y = a.astype(wide), b.astype(wide)
    is_same = (x == y) | (np.isnan(x) & np.isnan(y))
    if is_same.all():
        return 0.0, 0.0
    with np.errstate(invalid="ignore"):
        gap = float(np.abs(x - y)[~is_same].max())
    scale = float(max(np.abs(each[np.isfinite(each)]).max(initial=0) for each in (x, y)))
    return (gap, gap / scale) if math.isfinite(gap) else (math.inf, math.inf)
