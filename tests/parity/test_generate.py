"""Compares greedy decoding of a Hugging Face folder with `generate` of transformers, on the CPU in float32."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jgraph  # noqa: E402
from tests.parity import folders  # noqa: E402

pytestmark = pytest.mark.parity

PROMPTS = [[3, 14, 15, 9, 26], list(range(40, 57))]


@pytest.mark.parametrize("kind", folders.KINDS)
def test_greedy_tokens_equal_those_of_transformers(kind, tmp_path):
    loaded = jgraph.load(folders.save(kind, tmp_path))
    found = jgraph.generate(loaded.model, loaded.params, PROMPTS, max_tokens=24, temperature=0)
    model = folders.load(tmp_path)
    choices = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    for prompt, row in zip(PROMPTS, found, strict=True):
        tokens = torch.tensor([prompt])
        expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), **choices)[0, len(prompt) :]
        assert row.tolist() == expected.tolist()
    assert len(set(np.concatenate(found))) > 3
