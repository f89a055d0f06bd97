"""Scores the tasks of the Language Model Evaluation Harness (`lm-eval`) with a loaded model."""

import difflib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jgraph.data import library
from jgraph.errors import ConfigError, DataError, require
from jgraph.inference.generate import stream
from jgraph.inference.score import scores
from jgraph.inference.text import TextStream
from jgraph.train.loaded import Loaded, pieces

_LONGEST = 2048  # as in lm-eval, for a model with an unknown window
_GENERATION = {"do_sample", "temperature", "top_k", "top_p", "until", "max_gen_toks"}


class TaskScore(NamedTuple):
    """A metric of a task or of a group of tasks."""

    task: str
    # such as `acc`; followed by a comma and the name of the filter if the task filters outputs
    metric: str
    # a text if the task has no number for it
    value: Any
    stderr: float | None


def lm_eval_model(loaded: Loaded, *, batch_size: int = 8, max_length: int | None = None) -> Any:
    """Wraps a loaded model for `lm_eval.simple_evaluate`. Needs the extra `lm-eval`.

    Requests are tokenized and truncated like those of the `hf` model of `lm-eval`: spaces at the end of a context move to the
    continuation, and a long context loses its first tokens. An empty context becomes the begin-of-text token, or the
    end-of-text token if the tokenizer declares none. Chat templates are not supported.

    Args:
        loaded: A model with a tokenizer for text, from `jgraph.load`.
        batch_size: Number of requests that are computed at once; positive.
        max_length: Maximum number of tokens that the model reads; positive. None for `loaded.window`, or 2048 if that is None.

    Returns:
        An `lm_eval.api.model.LM`.

    Raises:
        ConfigError: If `batch_size` or `max_length` is not positive.
        DataError: If `lm-eval` is not installed, or the model has no tokenizer for text.
    """
    require(batch_size > 0, "batch_size", batch_size, "positive")
    require(max_length is None or max_length > 0, "max_length", max_length, "positive")
    library("lm_eval", extra="lm-eval")  # the error names this module
    base = library("lm_eval.api.model").TemplateLM
    return type("LoadedLM", (_LoadedLM, base), {})(loaded, batch_size, max_length or loaded.window or _LONGEST)


class _LoadedLM:
    """The methods of `lm_eval.api.model.TemplateLM` that depend on the model. A mixin, so that lm-eval is imported on use.

    For chat templates, override `apply_chat_template`, `chat_template` and `tokenizer_name` here.
    """

    cache_hook: Any
    eot_token_id: int = 0  # replaces an abstract property
    prefix_token_id: int = 0

    def __init__(self, loaded: Loaded, batch_size: int, max_length: int):
        super().__init__()
        self._loaded = loaded
        self.batch_size = batch_size
        self.max_length = max_length
        tokenizer = loaded.tokenizer
        tokenizer.encode("")  # an error without a tokenizer
        # A tokenizer without an end-of-text token separates documents by a newline, as in training.
        if not tokenizer.document_end:
            must = "declare `eos_token` in its tokenizer_config.json"
            raise DataError(f"{tokenizer.name}: has no token for the end of a text or a newline, which lm-eval needs: {must}")
        self.eot_token_id = tokenizer.document_end[0]
        self.prefix_token_id = self.eot_token_id if tokenizer.bos is None else tokenizer.bos
        self._prefix = tokenizer.decode([self.prefix_token_id])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not (self._prefix and string.startswith(self._prefix))
        return self._loaded.tokenizer.encode(string, special=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        # lm-eval moves a context of white space to the continuation.
        loaded = self._loaded
        start = [self.prefix_token_id]
        pairs = [(context or start, continuation) for _, context, continuation in requests]
        steps = scores(
            loaded.model,
            loaded.params,
            pairs,
            batch_size=self.batch_size,
            window=self.max_length,
            carried=loaded.carried,
        )
        found: dict[int, tuple[float, bool]] = {}
        for index, score in _progress(steps, len(pairs), "loglikelihood", disable_tqdm):
            found[index] = tuple(score)
            if (texts := requests[index][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[index])
        return [found[index] for index in range(len(pairs))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        utils = library("lm_eval.utils")
        windows = []
        owners = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            found = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            own = [(None, *utils.make_disjoint_window(window)) for window in found]
            windows += own
            owners += [number] * len(own)
        totals = [0.0] * len(requests)
        for owner, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        found: dict[int, str] = {}
        for index, text in _progress(self._generated(requests), len(requests), "generate_until", disable_tqdm):
            found[index] = text
            self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return [found[index] for index in range(len(requests))]

    def _generated(self, requests: Sequence[Any]) -> Iterator[tuple[int, str]]:
        rows = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        groups: dict[str, list[int]] = {}
        for index in sorted(range(len(rows)), key=lambda index: -len(rows[index])):
            groups.setdefault(repr(requests[index].args[1]), []).append(index)
        starts = [(own, start) for own in groups.values() for start in range(0, len(own), self.batch_size)]
        for seed, (own, start) in enumerate(starts):
            batch = own[start : start + self.batch_size]
            settings = library("lm_eval.models.utils").normalize_gen_kwargs(requests[batch[0]].args[1])
            yield from zip(batch, self._texts([rows[index] for index in batch], settings, seed), strict=True)

    def _texts(self, rows: list[list[int]], settings: dict[str, Any], seed: int) -> list[str]:
        unknown = sorted(settings.keys() - _GENERATION)
        new = settings["max_gen_toks"]
        require(not unknown, "generation_kwargs", ", ".join(unknown), f"some of {', '.join(sorted(_GENERATION))}")
        kept = self.max_length - new
        require(kept > 0, "max_gen_toks", new, f"less than {self.max_length}, the maximum length of the model")
        loaded = self._loaded
        count = len(rows)
        # All batches have the same number of rows, so that they share programs.
        rows = [row[-kept:] for row in rows] + [[self.prefix_token_id]] * (self.batch_size - len(rows))
        choices: dict[str, Any] = {"temperature": settings.get("temperature", 0.0) if settings["do_sample"] else 0.0}
        choices |= {name: settings[name] for name in ("top_k", "top_p") if name in settings}
        choices |= {"max_tokens": new, "window": self.max_length, "key": seed, "carried": loaded.carried}
        # Decoded without the context, as in lm-eval.
        until = [text for text in settings["until"] if text]
        decode = partial(loaded.tokenizer.decode, special=False)
        texts = [TextStream(decode, (), until) for _ in range(count)]
        found = [""] * count
        steps = stream(loaded.model, loaded.params, rows, stop=loaded.tokenizer.ends, **choices)
        for number, piece in pieces((tokens_B[:count] for tokens_B in steps), texts):
            found[number] += piece
        return found


def _progress(steps: Iterator[Any], total: int, name: str, disable: bool) -> Iterator[Any]:
    return library("tqdm").tqdm(steps, total=total, desc=name, disable=disable or None)


def score_tasks(
    loaded: Loaded,
    tasks: Sequence[str],  # names that lm-eval has, YAML files and folders of them; a file can name functions, which are run
    *,
    num_fewshot: int | None = None,  # None for the number of the task
    limit: int | None = None,  # documents of each task; None for all
    batch_size: int = 8,
    seq_len: int | None = None,
) -> list[TaskScore]:
    """Scores a model on tasks of `lm-eval`. Returns the metrics of each task and group."""
    require(num_fewshot is None or num_fewshot >= 0, "num_fewshot", num_fewshot, "0 or positive")
    require(limit is None or limit > 0, "limit", limit, "positive")
    require(seq_len is None or seq_len > 0, "seq_len", seq_len, "positive")
    model = lm_eval_model(loaded, batch_size=batch_size, max_length=seq_len)
    manager, specs = _resolved(tasks)
    try:
        found = manager.load(specs)
    except Exception as e:  # of any type: tasks download data and run functions
        raise DataError(f"lm-eval cannot load {', '.join(specs)}: {' '.join(f'{e!r}'.split())}") from e
    inside = {name for children in found["group_map"].values() for name in children}
    selected = [item for name, item in (found["tasks"] | found["groups"]).items() if name not in inside]
    run = library("lm_eval").simple_evaluate
    results = run(model, tasks=selected, task_manager=manager, num_fewshot=num_fewshot, limit=limit, log_samples=False)
    return [one for task, metrics in results["results"].items() for one in _task_scores(task, metrics)]


def _resolved(tasks: Sequence[str]) -> tuple[Any, list[str]]:
    """Returns the task manager of lm-eval, and names and files that its method `load` accepts."""
    make = library("lm_eval.tasks").TaskManager
    folders = [name for name in tasks if Path(name).is_dir()]
    named = [name for name in tasks if not Path(name).exists()]
    # The index of the tasks of lm-eval takes seconds.
    manager = make(include_path=folders, include_defaults=bool(named))
    specs = []
    for name in tasks:
        if name in folders:
            inside = make(include_path=name, include_defaults=False).all_subtasks
            require(bool(inside), "tasks", name, "a folder with YAML files of tasks")
            specs += inside
        elif name in named and name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"`tasks` is {name}: must be a task of lm-eval, a YAML file or a folder{hint}", field="tasks")
        else:
            specs.append(name)
    return manager, specs


def _task_scores(task: str, metrics: dict[str, Any]) -> Iterator[TaskScore]:
    for name, value in metrics.items():
        metric, is_metric, filtered = name.partition(",")
        if is_metric and not metric.endswith("_stderr"):
            stderr = metrics.get(f"{metric}_stderr,{filtered}")
            shown = metric if filtered == "none" else name
            value = value.item() if hasattr(value, "item") else value  # of NumPy
            yield TaskScore(task, shown, value, stderr if isinstance(stderr, float) else None)
