"""A fake candidate for tests: returns given times, and logs its phases to a file.

python -m tests.fake_variant '{"name": "x", "ms": [1.0, 2.0], "log": "FILE", "fails": ""}'
"""

import time
from pathlib import Path

from benchmarks.peers.protocol import answer, read_request, take_turns


def main() -> None:
    request = read_request()

    def enter(phase: str) -> None:
        with Path(request["log"]).open("a") as log:
            print(request["name"], phase, file=log)
        if request["fails"] == phase:
            raise RuntimeError(f"cannot {phase}")

    enter("build")
    deadline = time.monotonic() + 10
    while len(Path(request["log"]).read_text().splitlines()) < request.get("meets", 0):  # waits for parallel builds
        assert time.monotonic() < deadline, "the other candidates did not start to build"
    answer(device="none")
    left = list(request["ms"])

    def measure(timer):
        enter("turn")
        return {"ms": left.pop(0), "power_watts": None}

    take_turns(measure)
    enter("finish")
    answer(peak_bytes=1)


if __name__ == "__main__":
    main()
