"""Computes the FLOPs and bytes of the instructions of a compiled program, and finds the instructions that depend on the batch.

In a backward pass, a matmul of two operands that depend on the batch is a wgrad. If an operand depends on weights alone, it is
a dgrad.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Self, TypeAlias

from jaxlib import xla_client

from jgraph.errors import ProfileError
from jgraph.kernels.grouped import CALLS
from jgraph.xla.hlo import Computation, HloModule, Instruction, Shape

_GROUPED = re.compile("|".join(re.escape(f"jit({name}") for name in CALLS))
_SLICES = {"dynamic-slice", "slice", "gather"}
# True if a value depends on the batch, or one entry for each element of a tuple.
_Depends: TypeAlias = bool | list["_Depends"]


class Program(HloModule):
    """The text of a compiled program, with the FLOPs and bytes of its instructions. Create it with `Program.parse(text)`.

    FLOPs and bytes are of one run on one device. Methods raise ProfileError if a called computation is missing in the text.
    """

    @classmethod
    def of_proto(cls, proto: bytes) -> Self:
        """Parses a serialized `HloModuleProto` of a trace. Raises ProfileError if XLA cannot read it."""
        try:
            return cls.parse(xla_client.XlaComputation(proto).as_hlo_module().to_string())
        except RuntimeError as e:
            raise ProfileError(f"the program in the trace cannot be read ({e})") from e

    def matmul(self, instruction: Instruction) -> Instruction | None:
        """Returns the matmul or convolution with the most FLOPs `inside` the instruction; None without one."""
        return max((inner for inner in self.inside(instruction) if inner.is_matmul), key=self._own_flops, default=None)

    def flops(self, instruction: Instruction) -> int:
        """Counts the FLOPs of matmuls and attention `inside`. A multiplication and an addition are 2, other operations 0."""
        return sum(self._own_flops(inner) for inner in self.inside(instruction))

    def nbytes(self, instruction: Instruction) -> int:
        """Counts the bytes that an instruction reads and writes.

        Of an array that it slices or updates in place, only the sliced or updated part counts.
        """
        operands = self._operands(instruction)
        # Results of type byte are workspace of a library.
        written = sum(shape.nbytes for shape in instruction.shapes if shape.dtype not in ("s8", "u8"))
        if instruction.opcode in _SLICES:
            return 2 * written
        if instruction.opcode == "dynamic-update-slice":
            return 2 * sum(shape.nbytes for shape in operands[1].shapes)
        if instruction.opcode != "fusion":
            return written + sum(shape.nbytes for operand in operands for shape in operand.shapes)
        inner = self.computations[instruction.called[0]]
        updates = [i for i in inner.instructions.values() if i.opcode == "dynamic-update-slice"]
        for update in updates:
            written -= update.shapes[0].nbytes - inner.instructions[update.operands[1]].shapes[0].nbytes
        read = 0
        for parameter, operand in zip(inner.parameters(), operands, strict=False):
            users = [i for i in inner.instructions.values() if parameter.name in i.operands]
            whole = sum(shape.nbytes for shape in operand.shapes)
            if users and all(user.opcode in _SLICES for user in users):
                read += min(whole, sum(user.shapes[0].nbytes for user in users))
            elif not (users and all(user in updates and user.operands[0] == parameter.name for user in users)):
                read += whole
        return max(written, 0) + read

    def sent_bytes(self, instruction: Instruction) -> int:
        """Estimates the bytes that a collective sends from one device: its operands or results, twice for an all-reduce."""
        operands = sum(shape.nbytes for operand in self._operands(instruction) for shape in operand.shapes)
        results = sum(shape.nbytes for shape in instruction.shapes)
        results -= operands if instruction.opcode.endswith("-start") else 0  # the operands are part of its result
        is_all_reduce = any(inner.opcode.startswith("all-reduce") for inner in self.inside(instruction))
        return max(operands, results) * (2 if is_all_reduce else 1)

    def label(self, instruction: Instruction) -> str:
        """Returns a label that is equal for instructions with the same work and shapes, such as `transpose bf16[64,16]`.

        With a matmul or attention inside: `matmul bf16[4,8] x bf16[8,2] -> bf16[4,2]` or `attention forward bf16[8,128,12,64]`.
        """
        if (matmul := self.matmul(instruction)) is not None:
            return f"matmul {self._shape(matmul, 0)} x {self._shape(matmul, 1)} -> {matmul.shapes[0]}"
        if attention := next((inner for inner in self.inside(instruction) if inner.is_attention), None):
            way = "backward" if "Backward" in attention.target else "forward"
            return f"attention {way} {self._shape(attention, 0)}"
        if self._grouped_flops(instruction):
            shapes = [operand.shapes[0] for operand in self._operands(instruction)]
            operands = " x ".join([str(shape) for shape in shapes if len(shape.dims) > 1][:2])
            return f"grouped matmul {operands} -> {instruction.shapes[0]}"
        kind = instruction.opcode
        if kind == "fusion":
            kind = re.sub(r"[._]?\d*$", "", instruction.name).replace("_", " ")
        more = " ..." if len(instruction.shapes) > 3 else ""
        return f"{kind} {' '.join(map(str, instruction.shapes[:3]))}{more}"

    def _own_flops(self, instruction: Instruction) -> int:
        """Counts FLOPs without those of called computations."""
        if not instruction.is_matmul:
            return self._attention_flops(instruction) if instruction.is_attention else self._grouped_flops(instruction)
        left = self._shape(instruction, 0)
        dims = re.search(r'lhs_contracting_dim(?:ension)?s"?[:=]\s*[\[{]([^\]}]*)', instruction.text)
        if left is None or dims is None:
            return 0
        contracted = math.prod(left.dims[int(d)] for d in re.findall(r"\d+", dims[1]))
        return 2 * instruction.shapes[0].size * contracted

    def _attention_flops(self, instruction: Instruction) -> int:
        """Counts two matmuls forward and five backward (FlashAttention-2, arXiv:2307.08691), half of each if causal."""
        sizes = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', instruction.text)
        query = self._shape(instruction, 0)
        if sizes is None or query is None:
            return 0
        matmuls = 5 if "Backward" in instruction.target else 2
        flops = matmuls * 2 * math.prod(map(int, re.findall(r"\d+", sizes[1]))) * query.dims[-1]
        return flops // 2 if "CAUSAL" in instruction.text else flops

    def _grouped_flops(self, instruction: Instruction) -> int:
        """Counts a grouped matmul as if every row belonged to a group. 0 for other instructions."""
        if instruction.opcode != "custom-call" or not _GROUPED.search(instruction.op_name):
            return 0
        operands = [operand.shapes[0] for operand in self._operands(instruction)]
        # [R, D] x [E, D, F] -> [R, F], or for wgrad, [R, D] x [R, F] -> [E, D, F]: two of the three have two axes.
        rows, *others = [shape for shape in (*operands, *instruction.shapes) if len(shape.dims) == 2]
        return 2 * math.prod(rows.dims) * others[0].dims[1]

    def _operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def _shape(self, instruction: Instruction, operand: int) -> Shape | None:
        names = instruction.operands
        found = self.instructions.get(names[operand]) if operand < len(names) else None
        return found.shapes[0] if found else None

    @cached_property
    def batch_dependent(self) -> set[str]:
        """The names of the instructions that depend on the batch: on the arguments that are not state.

        The state of a step is donated, so outputs reuse its buffers. Without donation, an argument like an output is state.
        """
        found: set[str] = set()
        computation = self.computations[self.entry]
        parameters = computation.parameters()
        updated = {int(parameter) for _, parameter, _ in self._aliases}
        if not updated:
            outputs = Counter(list(computation.instructions.values())[-1].shapes)
            for number, parameter in enumerate(parameters):
                if outputs[parameter.shapes[0]]:
                    outputs[parameter.shapes[0]] -= 1
                    updated.add(number)
        self._spread(computation, [number not in updated for number in range(len(parameters))], found)
        return found

    def _spread(self, computation: Computation, arguments: Sequence[_Depends], found: set[str]) -> _Depends:
        """Adds the names of instructions that depend on the batch to `found`. Returns the dependence of the result."""
        values: dict[str, _Depends] = {}
        numbers = {p.name: n for n, p in enumerate(computation.parameters())}
        for i in computation.instructions.values():
            operands = [values.get(name, False) for name in i.operands]
            called = [self.computations[name] for name in i.called if name in self.computations]
            if i.opcode == "parameter":
                value = arguments[numbers[i.name]] if numbers[i.name] < len(arguments) else False
            elif i.opcode == "tuple":
                value = operands
            elif i.opcode == "get-tuple-element" and isinstance(operands[0], list):
                value = operands[0][int(re.findall(r"index=(\d+)", i.text)[0])]
            elif i.opcode == "while":
                value = operands[0]
                body = next(c for c in called if f"body=%{c.name}" in i.text or f"body={c.name}" in i.text)
                # Terminates, because dependence can only grow.
                while (after := _either(value, self._spread(body, [value], found))) != value:
                    value = after
            elif i.opcode == "conditional":
                value = _either(*(self._spread(c, [operand], found) for c, operand in zip(called, operands[1:], strict=False)))
            elif i.opcode in ("fusion", "call", "async-start") and called:
                value = self._spread(called[0], operands, found)
            else:
                value = _any(operands)
            values[i.name] = value
            if _any(value):
                found.add(i.name)
        return list(values.values())[-1]


def _any(value: _Depends) -> bool:
    return any(map(_any, value)) if isinstance(value, list) else value


def _either(*values: _Depends) -> _Depends:
    lists = [value for value in values if isinstance(value, list)]
    if len(lists) == len(values):
        return [_either(*parts) for parts in zip(*lists, strict=True)]
    return any(map(_any, values))
