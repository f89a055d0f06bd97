"""What the PyTorch peers share: their device, the training step, compilation, CUDA graphs, and the turns of one process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers.protocol import answer, take_turns
from jgraph.train.config import TrainConfig

Step = Callable[[], Any]


def own_device() -> torch.device:
    """Returns the GPU, or the CPU for tests."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """Returns the name of the GPU, or cpu."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def wait() -> None:
    """Blocks until the GPU is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_tokens(config: TrainConfig, length: int, device: torch.device, *, rank: int = 0, ranks: int = 1) -> Tensor:
    """Returns the rows of a rank of a fixed batch with `length` random tokens per row."""
    shape = config.input.batch_size, length
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).reshape(ranks, -1, length)
    return torch.tensor(tokens[rank], device=device)


def training_step(forward: Callable[[], Tensor], optimizer: torch.optim.Optimizer, clip: Step) -> Callable[[], Tensor]:
    """Returns a training step: forward, backward, clipping and update. It returns the loss."""

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward()
        loss.backward()
        clip()
        optimizer.step()
        return loss.detach()

    return step


def compiled(function: Callable[..., Any], variant: str) -> Callable[..., Any]:
    """Compiles a function if its variant has the word compile.

    CUDA graphs of Inductor are off, because they copy the inputs. The whole step is captured instead.
    """
    if "compile" not in variant:
        return function
    return torch.compile(function, mode="max-autotune-no-cudagraphs" if "max-autotune" in variant else None)


def warm_up(step: Step) -> None:
    """Runs a step four times on a side stream, so that a later CUDA graph capture allocates no persistent state."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)


def with_cudnn(step: Step) -> Step:
    """Returns a step that prefers the attention of cuDNN. Call it before the first step."""
    # Its key lacks the backend: a compiled step would use the attention of an earlier process with another backend.
    functorch_config.enable_autograd_cache = False
    backends = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH

    def run() -> Any:
        with sdpa_kernel([*backends], set_priority=True):
            return step()

    return run


def capture(step: Step, **options: Any) -> torch.cuda.CUDAGraph:
    """Captures a warm step in a CUDA graph. Frees the memory of the eager steps, because the graph has its own pool."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        step()
    torch.cuda.empty_cache()
    return graph


def time_steps(run: Step, **row: Any) -> None:
    """Answers the device and `row`, times `run` once per turn, and answers the peak memory."""
    answer(device=device_name(), **row)
    take_turns(lambda timer: timer.back_to_back(run, wait))
    if torch.cuda.is_available():
        answer(peak_bytes=torch.cuda.max_memory_allocated())
