"""Compares the mesh axis `context` on fake devices of one process with split sequences in two PyTorch processes."""

import numpy as np
import pytest

pytest.importorskip("torch")

from jgraph_models import gpt
from tests.parity.test_gpt import BATCH, LENGTH
from tests.parity.test_tensor_parallel import (
    CASES,
    assert_agrees,
    assert_caught,
    gathered_shapes,
    our_pass,
    references,
)

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("context", [2, 4])
def test_loss_and_every_gradient_equal_split_sequences(context, case):
    assert_agrees(our_pass(case, context=context).arrays, references()["context", case])


@pytest.mark.parametrize("case", CASES)
def test_pytorch_has_the_first_and_the_last_chunk_on_the_first_rank(case):
    first, second = references()["context", case]["positions"].reshape(2, -1)
    assert first.tolist() == [*range(LENGTH // 4), *range(3 * LENGTH // 4, LENGTH)]
    assert second.tolist() == [*range(LENGTH // 4, 3 * LENGTH // 4)]


@pytest.mark.parametrize("case", CASES)
def test_each_layer_gathers_only_keys_and_values(case):
    config = CASES[case]
    keys = BATCH, LENGTH, config.num_kv_heads, config.head_size
    assert gathered_shapes(our_pass(case, context=2).program) == [keys] * 2 * config.num_layers


@pytest.mark.parametrize("case", CASES)
def test_tokens_in_another_order_than_the_gathered_keys_are_detected(case, monkeypatch):
    monkeypatch.setattr(gpt, "token_order", lambda length: np.arange(length, dtype=np.int32))
    assert_caught(our_pass(case, context=2).arrays, references()["context", case])
