"""A variant for tests of the turns: it times nothing, and writes down in a file what it is made to do.

python -m tests.fake_variant '{"name": "x", "ms": [1.0, 2.0], "log": "FILE", "fails": ""}'
"""

import time
from pathlib import Path

from benchmarks.peers.protocol import answer, read_request, take_turns


def main() -> None:
    request = read_request()

    def note(what: str) -> None:
        with Path(request["log"]).open("a") as log:
            print(request["name"], what, file=log)
        if request["fails"] == what:
            raise RuntimeError(f"cannot {what}")

    note("build")
    deadline = time.monotonic() + 10
    while len(Path(request["log"]).read_text().splitlines()) < request.get("meets", 0):  # so many builds are under way
        assert time.monotonic() < deadline, "alone"
    answer(device="none")
    left = list(request["ms"])

    def measure(clock):
        note("turn")
        return {"ms": left.pop(0), "power_watts": None}

    take_turns(measure)
    note("finish")
    answer(peak_bytes=1)


if __name__ == "__main__":
    main()
