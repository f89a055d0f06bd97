"""Computes the FLOPs and bytes of the instructions of a compiled program, and finds the instructions that depend on the batch.

In a backward pass, a matmul of two operands that depend on the batch is a wgrad. One with an operand that depends on weights
alone is a dgrad.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
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
    """The text of a compiled program, with the FLOPs and bytes of its instructions.

    Create it with `Program.of(compiled.as_text())`. `instructions` is a dict of all `Instruction`s of the program by name. The
    methods take one of its values as their argument. FLOPs and bytes are of one run of the instruction on one device.
    """

    @classmethod
    def of_proto(cls, proto: bytes) -> Self:
        """Parses a program that a trace contains.

        Args:
            proto: A serialized `HloModuleProto`.

        Raises:
            ProfileError: If XLA cannot read the program.
        """
        try:
            return cls.of(xla_client.XlaComputation(proto).as_hlo_module().to_string())
        except RuntimeError as e:
            raise ProfileError(f"the program in the trace cannot be read ({e})") from e

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields an instruction and, if it is a fusion, call or asynchronous start, the instructions inside it, recursively.

        Args:
            instruction: An instruction of this program, a value of `instructions`. It is yielded first.

        Raises:
            ProfileError: If the text of the program is damaged: a called computation is missing.
        """
        yield instruction
        if instruction.opcode in ("fusion", "async-start", "call"):
            for name in instruction.called:
                if name not in self.computations:
                    raise ProfileError(f"the text of the program is damaged: {instruction.name} calls {name}, which is missing")
                for inner in self.computations[name].instructions.values():
                    yield from self.inside(inner)

    def matmul(self, instruction: Instruction) -> Instruction | None:
        """Returns the matmul or convolution with the most FLOPs among an instruction and those that `inside` yields for it.

        None if there is none.

        Args:
            instruction: An instruction of this program, a value of `instructions`.

        Raises:
            ProfileError: If the text of the program is damaged: a called computation is missing.
        """
        return max((inner for inner in self.inside(instruction) if inner.is_matmul), key=self._own_flops, default=None)

    def flops(self, instruction: Instruction) -> int:
        """Counts the FLOPs of the matmuls and attention in an instruction, also inside a fusion or call.

        A multiplication and an addition are 2 FLOPs. A grouped matmul multiplies each row by the matrix of the row's group. It
        counts as if every row belonged to a group. All other operations count as 0.

        Args:
            instruction: An instruction of this program, a value of `instructions`.

        Raises:
            ProfileError: If the text of the program is damaged: a called computation is missing.
        """
        return sum(self._own_flops(inner) for inner in self.inside(instruction))

    def nbytes(self, instruction: Instruction) -> int:
        """Counts the bytes that an instruction reads and writes.

        If the instruction slices an array or updates it in place, only the sliced or updated part counts. Results of dtype int8
        or uint8 do not count, because they are the workspace of a library.

        Args:
            instruction: An instruction of this program, a value of `instructions`.
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
        """Estimates the bytes that a collective, such as an all-gather, sends from one device.

        The estimate is the total size of the operands or of the results, whichever is larger. For an all-reduce it is twice
        that.

        Args:
            instruction: A collective of this program, a value of `instructions`.

        Raises:
            ProfileError: If the text of the program is damaged: a called computation is missing.
        """
        operands = sum(shape.nbytes for operand in self._operands(instruction) for shape in operand.shapes)
        results = sum(shape.nbytes for shape in instruction.shapes)
        results -= operands if instruction.opcode.endswith("-start") else 0  # the operands are part of its result
        is_all_reduce = any(inner.opcode.startswith("all-reduce") for inner in self.inside(instruction))
        return max(operands, results) * (2 if is_all_reduce else 1)

    def label(self, instruction: Instruction) -> str:
        """Returns a label that is equal for instructions with the same work and shapes.

        An instruction with a matmul or attention inside has a label such as
        `matmul bf16[16,1024] x bf16[1024,64] -> bf16[16,64]` or `attention forward bf16[8,1024,12,64]`. The label of another
        instruction is its kind and at most three result shapes, such as `transpose bf16[64,16]`. The kind is the opcode, or for
        a fusion its name without the number.

        Args:
            instruction: An instruction of this program, a value of `instructions`.

        Raises:
            ProfileError: If the text of the program is damaged: a called computation is missing.
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
        return f"{kind} {' '.join(map(str, instruction.shapes[:3]))}{' ...' * (len(instruction.shapes) > 3)}"

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
        """Counts the FLOPs of a grouped matmul kernel, as if every row belonged to a group. 0 for other instructions."""
        if instruction.opcode != "custom-call" or not _GROUPED.search(instruction.op_name):
            return 0
        operands = [operand.shapes[0] for operand in self._operands(instruction)]
        rows, *others = [shape for shape in (*operands, *instruction.shapes) if len(shape.dims) == 2]
        return 2 * math.prod(rows.dims) * others[0].dims[1]

    def _operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def _shape(self, instruction: Instruction, operand: int) -> Shape | None:
        found = self.instructions.get((*instruction.operands, "", "")[operand])
        return found.shapes[0] if found else None

    @cached_property
    def of_batch(self) -> set[str]:
        """The names of the instructions whose results depend on the batch, a set of str. A property.

        Every argument of the program whose buffer no output reuses counts as a part of the batch. The state of a training step
        is donated, so outputs reuse its buffers. If nothing is donated, an argument with the shape of an output is state.
        """
        found: set[str] = set()
        computation = self.computations[self.entry]
        parameters, updated = computation.parameters(), {int(parameter) for _, parameter, _ in self._aliases}
        if not updated:
            outputs = Counter(list(computation.instructions.values())[-1].shapes)
            for number, parameter in enumerate(parameters):
                if outputs[parameter.shapes[0]]:
                    outputs[parameter.shapes[0]] -= 1
                    updated.add(number)
        self._spread(computation, [number not in updated for number in range(len(parameters))], found)
        return found

    def _spread(self, computation: Computation, arguments: Sequence[_Depends], found: set[str]) -> _Depends:
        """Adds the names of instructions that depend on the batch to `found`. Returns True if the result depends on it."""
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
