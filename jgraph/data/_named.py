"""Corpora that need no download: text that comes with Python, and a Markov chain with a known entropy.

The documentation and the standard library differ between Python versions. The fingerprint of the corpus shows it.
"""

import math
import os
import string
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

_SEED = 0x6A67726170680000
_SYMBOLS = (string.ascii_letters + string.digits + " .").encode()
_NUM_DOCUMENTS = 512
_DOCUMENT_SYMBOLS = 4096
# Successor k of 4 takes as many of the 8 values of three random bits: probabilities 1/2, 1/4, 1/8, 1/8.
_SUCCESSOR_OF_BITS = np.array([0, 0, 0, 0, 1, 1, 2, 3])
SYNTHETIC_ENTROPY = 1.75 * math.log(2)
"""Entropy rate of `synthetic` in nats per symbol: 1/2*1 + 1/4*2 + 1/8*3 + 1/8*3 = 1.75 bits after any two symbols."""


def python_docs() -> list[bytes]:
    """Returns the language reference as `help()` shows it: the topics of `pydoc_data.topics`, by name."""
    from pydoc_data.topics import topics

    return [topics[name].encode() for name in sorted(topics)]


def python_source() -> list[bytes]:
    """Returns the standard library's .py files, without tests and installed packages, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return [path.read_bytes() for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix())]


def synthetic() -> list[bytes]:
    """Returns 2 MiB of an order-2 Markov chain over 64 letters, digits and signs. The bytes are the same on every machine.

    Each pair of symbols has four successors, drawn once, with probabilities 1/2, 1/4, 1/8 and 1/8. So the entropy rate is
    1.75 bits or 1.2130 nats per symbol (`SYNTHETIC_ENTROPY`). The first two symbols of a document and its newline cannot be
    predicted: they raise the lowest mean loss to about 1.2164 nats.
    """
    # Raw Philox output and a stable sort, not Generator methods: numpy promises to keep the former (NEP 19).
    bits = np.random.Philox(key=_SEED)
    num_symbols = len(_SYMBOLS)
    keys = bits.random_raw(num_symbols**3).reshape(num_symbols, num_symbols, num_symbols)
    successors = np.argsort(keys, axis=-1, kind="stable")[..., :4]
    draws = bits.random_raw(_DOCUMENT_SYMBOLS * _NUM_DOCUMENTS).reshape(_DOCUMENT_SYMBOLS, _NUM_DOCUMENTS)
    chain = np.empty((_DOCUMENT_SYMBOLS, _NUM_DOCUMENTS), np.int64)
    chain[:2] = draws[:2] % num_symbols
    choices = _SUCCESSOR_OF_BITS[draws % 8]
    for t in range(2, _DOCUMENT_SYMBOLS):
        chain[t] = successors[chain[t - 2], chain[t - 1], choices[t]]
    symbols = np.frombuffer(_SYMBOLS, np.uint8)
    return [symbols[document].tobytes() for document in chain.T]


CORPORA: dict[str, Callable[[], list[bytes]]] = {
    "python-docs": python_docs,
    "python-source": python_source,
    "synthetic": synthetic,
}
"""Named corpora: functions that return their documents."""
