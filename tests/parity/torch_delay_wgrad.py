"""A linear layer in PyTorch that queues its weight gradient like `delay_wgrad_compute` of Transformer Engine."""

from collections import deque

import torch


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, queue):
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.queue.append((x, dy))
        return dy @ weight, None, dy.flatten(0, -2).sum(0), None


class DelayedLinear(torch.nn.Module):
    """A linear layer with a queue of delayed weight gradients.

    `backward()` computes dx and the bias gradient. `backward_dw()` computes the weight gradient of the oldest queued backward.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
        self.main_grad = torch.zeros_like(weight)
        self._queue: deque = deque()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Delayed.apply(x, self.weight, self.bias, self._queue)

    def backward_dw(self, newest: bool = False) -> None:
        x, dy = self._queue.pop() if newest else self._queue.popleft()
        self.main_grad += dy.flatten(0, -2).T @ x.flatten(0, -2)
