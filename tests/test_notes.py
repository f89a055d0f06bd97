"""What the notes say of the tests."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_table_of_upstreams_rules_names_is_there_and_every_row_names_one():
    rows = [line for line in (ROOT / "notes/upstream.md").read_text().splitlines() if re.match(r"\| (TE|Megatron-LM) #", line)]
    assert {row.split("|")[1].strip() for row in rows} == {"TE #2376", "TE #2937", "Megatron-LM #3970", "Megatron-LM #4663"}
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test: {row}"
        for path, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"
