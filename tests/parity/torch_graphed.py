"""A model of the buffers of Transformer Engine's make_graphed_callables, in PyTorch on the CPU, with optional former faults.

A CUDA graph reads and writes fixed addresses, so a replay overwrites the results of the previous replay. Here a replay is a
method that writes to static buffers with `copy_`. Sources: TransformerEngine #2376, #2937, Megatron-LM #3970.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# B batch, D model; a stage is y = tanh((x * mask) @ w + b)


class Buffer:
    """A static buffer and a count of its writes and releases."""

    def __init__(self, tensor: Tensor, pool: "Pool"):
        self.tensor, self.pool, self.uses = tensor, pool, 0

    def release(self) -> None:
        if self.pool.reuse:
            self.uses += 1
            self.pool.free.append(self)


class Pool:
    """Buffers of one kind: one per callable and microbatch. With `reuse`, the first released buffer is used again."""

    def __init__(self, reuse: bool):
        self.reuse = reuse
        self.free: deque[Buffer] = deque()
        self.static: dict[object, Buffer] = {}

    def write(self, name: object, value: Tensor) -> Buffer:
        if self.reuse:
            buffer = self.free.popleft() if self.free else Buffer(torch.empty_like(value), self)
        else:
            buffer = self.static.setdefault(name, Buffer(torch.empty_like(value), self))
        buffer.uses += 1
        buffer.tensor.copy_(value)
        return buffer


class Weak:
    """A weak reference to a buffer. `value` is the current content of the buffer."""

    def __init__(self, buffer: Buffer):
        self.buffer, self._uses = buffer, buffer.uses

    @property
    def value(self) -> Tensor:
        return self.buffer.tensor

    @property
    def stale(self) -> bool:
        return self.buffer.uses != self._uses


@dataclass
class _Pending:
    microbatch: int
    x: Buffer
    y: Buffer
    mask: Tensor | None
    dy: Buffer | None = None
    db: Tensor | None = None

    def release(self) -> None:
        for buffer in (self.x, self.y, self.dy):
            assert buffer is not None
            buffer.release()


class Graphed:
    """Callables with one forward and one backward graph per microbatch. Microbatches are processed first in, first out.

    Args:
        params: {"w", "b"} of each callable, as numpy arrays.
        delayed: For each callable, whether `wgrad` computes the gradient of w and adds it to `main_grad`. The list is not
            copied. It models the flag `skip_backward_post_hook` of the parameters.
        microbatches: Number of graphs per callable. Every step replays the same graphs.
        reuse: Whether buffers are reused after their release.
        param_grads: "owned" returns clones of undelayed gradients, and main_grad itself for delayed gradients. "static" (before
            #2937) returns static buffers. "cloned" also clones delayed gradients.
        policy: Time at which `delayed` is read: "built" or "replayed". Only "replayed" is a fault.
        release: Action that releases the inputs of a wgrad: the "wgrad", or before #2376 its "dgrad".
        weak: Memory that is reused: buffers of the "pool", or before #3970 "any" tensor that a graph has read.
    """

    def __init__(
        self,
        params: list[dict],
        delayed: list[bool],
        *,
        microbatches: int = 1,
        reuse: bool = False,
        param_grads: Literal["owned", "static", "cloned"] = "owned",
        policy: Literal["built", "replayed"] = "built",
        release: Literal["wgrad", "dgrad"] = "wgrad",
        weak: Literal["pool", "any"] = "pool",
    ):
        self.params = [{name: torch.tensor(value) for name, value in stage.items()} for stage in params]
        self.main_grad: list[dict] = [
            {"w": torch.zeros_like(p["w"]) if late else None, "b": None} for p, late in zip(self.params, delayed, strict=True)
        ]
        self._delayed = tuple(delayed)
        self._skipped = self._delayed if policy == "built" else delayed
        self._microbatches, self._param_grads, self._release, self._weak = microbatches, param_grads, release, weak
        self._pools = {kind: Pool(reuse) for kind in ("x", "y", "dy", "dx")}
        self._grads: dict[tuple, Tensor] = {}
        self._counts = [0] * len(params)
        self._forwards: list[deque[_Pending]] = [deque() for _ in params]
        self._dgrads: list[deque[_Pending]] = [deque() for _ in params]

    tensor = staticmethod(torch.tensor)

    def forward(self, c: int, x: Tensor | Weak, mask: Tensor | None = None) -> Weak:
        name = (c, self._counts[c] % self._microbatches)
        self._counts[c] += 1
        x_BD = self._pools["x"].write(name, read(x))
        y_BD = self._pools["y"].write(name, torch.tanh(_masked(x_BD.tensor, mask) @ self.params[c]["w"] + self.params[c]["b"]))
        self._forwards[c].append(_Pending(name[1], x_BD, y_BD, mask))
        if mask is not None and self._weak == "any":
            Buffer(mask, self._pools["x"]).release()
        return Weak(y_BD)

    def backward(self, c: int, dy: Tensor | Weak) -> tuple[dict, Tensor | Weak]:
        """Returns the parameter gradients and dx."""
        dx = self.dgrad(c, dy)
        return self.wgrad(c), dx

    def dgrad(self, c: int, dy: Tensor | Weak) -> Tensor | Weak:
        call = self._forwards[c].popleft()
        call.dy = self._pools["dy"].write((c, call.microbatch), read(dy))
        if isinstance(dy, Weak):
            dy.buffer.release()
        dz_BD = _dz(call)
        dx = self._pools["dx"].write((c, call.microbatch), _masked(dz_BD @ self.params[c]["w"].T, call.mask))
        call.db = self._returned(self._static((c, call.microbatch, "b"), dz_BD.sum(0)), alias=False)
        self._dgrads[c].append(call)
        if self._release == "dgrad":
            call.release()
        if c > 0:
            return Weak(dx)
        dx.release()
        return dx.tensor.clone()  # copied before the buffer is overwritten

    def wgrad(self, c: int) -> dict:
        call = self._dgrads[c].popleft()
        dw_DD = _masked(call.x.tensor, call.mask).T @ _dz(call)
        if self._delayed[c]:
            static = self.main_grad[c]["w"]
            static += dw_DD
        else:
            static = self._static((c, call.microbatch, "w"), dw_DD)
        if self._release == "wgrad":
            call.release()
        return {"w": self._returned(static, alias=self._skipped[c] and self._param_grads != "cloned"), "b": call.db}

    def zero_grads(self) -> None:
        for total in self.main_grad:
            if total["w"] is not None:
                total["w"].zero_()

    def sgd(self, grads: list[dict], rate: float) -> None:
        """Updates the parameters in place, because a graph reads them at their captured addresses."""
        for stage, gradients in zip(self.params, grads, strict=True):
            for name, value in stage.items():
                value -= rate * torch.as_tensor(gradients[name])

    def _static(self, name: tuple, value: Tensor) -> Tensor:
        return self._grads.setdefault(name, torch.empty_like(value)).copy_(value)

    def _returned(self, static: Tensor, alias: bool) -> Tensor:
        return static if alias or self._param_grads == "static" else static.clone()


def read(x: Tensor | Weak) -> Tensor:
    return x.value if isinstance(x, Weak) else x


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


def _dz(call: _Pending) -> Tensor:
    assert call.dy is not None
    return call.dy.tensor * (1 - call.y.tensor**2)


def exact_step(params: list[dict], xs, targets, masks=None, *, scale: float) -> list[dict]:
    """Returns the gradients of the sum over microbatches of scale |y - target|² / 2, by torch.autograd in float64."""
    leaves = [{name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in p.items()} for p in params]
    for m, (x, target) in enumerate(zip(xs, targets, strict=True)):
        mask = None if masks is None else torch.tensor(masks[m], dtype=torch.float64)
        y = torch.tensor(x, dtype=torch.float64)
        for stage in leaves:
            y = torch.tanh(_masked(y, mask) @ stage["w"] + stage["b"])
        (0.5 * scale * (y - torch.tensor(target, dtype=torch.float64)).square().sum()).backward()
    return [{name: leaf.grad.numpy() for name, leaf in stage.items()} for stage in leaves]
