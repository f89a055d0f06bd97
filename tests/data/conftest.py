import json
import random
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def story(seed: int, *, words: int = 60) -> str:
    """Returns a document of random words, unique for each seed."""
    choices = random.Random(seed).choices(("red", "green", "blue", "cat", "dog", "ran", "far", "home.", "ünïcode"), k=words)
    return " ".join([*choices, str(seed)])


@pytest.fixture(scope="session")
def stories() -> list[str]:
    return [story(seed) for seed in range(40)]


@pytest.fixture
def text_file(tmp_path, stories) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(stories), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory, stories) -> Path:
    """Writes a byte-level BPE tokenizer with 300 ids and an end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(stories, trainer)
    # Tokenizers of BERT-like models enable truncation. Making token files must ignore it.
    tokenizer.enable_truncation(8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def rendered_here(monkeypatch):
    """Renders chat templates in this process, because another one takes a second to start."""
    from jgraph.data import chat

    @contextmanager
    def here(function, *_):
        assert function == "jgraph.data.chat:conversation"

        def call(jobs):
            for job in json.loads(json.dumps(jobs)):
                try:
                    yield chat.conversation(**job)
                except Exception as e:
                    yield " ".join(str(e).split())

        yield call

    monkeypatch.setattr(chat, "limited", here)
