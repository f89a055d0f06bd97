"""The work of a compiled program's instructions, and on what each depends.

Work is floating-point operations and bytes. In a backward pass a product whose factors both depend on the batch makes the
gradient of a weight; one with a factor made of weights alone makes that of an activation.
"""

import math
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from jgraph.errors import ProfileError
from jgraph.kernels.grouped import CALLS
from jgraph.xla.hlo import Computation, HloModule, Instruction, Shape
from jgraph.xla.source import operations

_GROUPED = re.compile("|".join(re.escape(f"jit({name}") for name in CALLS))
_SLICES = {"dynamic-slice", "slice", "gather"}


class Program(HloModule):
    """A compiled program, with what its instructions compute and move."""

    @cached_property
    def home(self) -> dict[str, Computation]:
        """Maps an instruction to the computation that it is in."""
        return {name: computation for computation in self.computations.values() for name in computation.instructions}

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields an instruction and, where it is a fusion or starts something asynchronous, those within, outermost first."""
        yield instruction
        if instruction.opcode in ("fusion", "async-start", "call"):
            for name in instruction.called:
                if name not in self.computations:
                    raise ProfileError(f"the program's text is damaged: {instruction.name} calls {name}, which is not there")
                for inner in self.computations[name].instructions.values():
                    yield from self.inside(inner)

    def product(self, instruction: Instruction) -> Instruction | None:
        """Returns the matrix product that an instruction is or has in it, the largest of several."""
        products = [inner for inner in self.inside(instruction) if inner.is_product]
        return max(products, key=self.own_flops, default=None)

    def sources(self, names: Sequence[str]) -> dict[str, str]:
        """Returns `file:line` of the instructions that have one."""
        return {name: op.source for name, op in operations(self, names).items() if op.source}

    def flops(self, instruction: Instruction) -> int:
        """Counts the FLOPs of matrix products and attention, 2 for each multiplication with its addition."""
        return sum(self.own_flops(inner) for inner in self.inside(instruction))

    def own_flops(self, instruction: Instruction) -> int:
        """Counts the FLOPs without those of what is called."""
        if instruction.is_product:
            left = self._shape(instruction, 0)
            dims = re.search(r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)', instruction.text)
            if left is None or dims is None:
                return 0
            contracted = math.prod(left.dims[int(d)] for d in re.findall(r"\d+", dims[1]))
            return 2 * instruction.shapes[0].size * contracted
        if instruction.is_attention:
            return self._attention_flops(instruction)
        return self._grouped_flops(instruction)

    def nbytes(self, instruction: Instruction) -> int:
        """Counts bytes read once and written; of what is sliced or updated within a fusion, only that part."""
        operands = self._operands(instruction)
        # A result of bytes is room that a library works in.
        written = sum(shape.nbytes for shape in instruction.shapes if shape.dtype not in ("s8", "u8"))
        if instruction.opcode in _SLICES:
            return 2 * written
        if instruction.opcode == "dynamic-update-slice":
            return 2 * sum(shape.nbytes for shape in operands[1].shapes)
        if instruction.opcode != "fusion":
            return written + sum(shape.nbytes for operand in operands for shape in operand.shapes)
        inner = self.computations[instruction.called[0]]
        updates = [i for i in inner.instructions.values() if i.opcode == "dynamic-update-slice"]
        for update in updates:  # in place: the whole is neither read nor written
            part = inner.instructions[update.operands[1]].shapes[0].nbytes
            written -= update.shapes[0].nbytes - part
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
        """Estimates the bytes of a collective: the larger of what goes in and what comes out, twice for an all-reduce."""
        inner = next((i for i in self.inside(instruction) if i.opcode.startswith("all-reduce")), None)
        given = sum(shape.nbytes for operand in self._operands(instruction) for shape in operand.shapes)
        made = sum(shape.nbytes for shape in instruction.shapes)
        made -= given if instruction.opcode.endswith("-start") else 0  # which has the operands among its results
        return max(given, made) * (2 if inner else 1)

    def label(self, instruction: Instruction) -> str:
        """Returns a text that is the same for instructions that do the same with the same shapes."""
        product = self.product(instruction)
        if product is not None:
            shapes = [self._shape(product, i) for i in range(2)]
            return f"product {' x '.join(map(str, shapes))} -> {product.shapes[0]}"
        if attention := next((inner for inner in self.inside(instruction) if inner.is_attention), None):
            way = "backward" if "Backward" in attention.target else "forward"
            return f"attention {way} {self._shape(attention, 0)}"
        if self._grouped_flops(instruction):
            shapes = [operand.shapes[0] for operand in self._operands(instruction)]
            operands = " x ".join([str(shape) for shape in shapes if len(shape.dims) > 1][:2])
            return f"grouped product {operands} -> {instruction.shapes[0]}"
        what = instruction.opcode
        if what == "fusion":
            what = re.sub(r"[._]?\d*$", "", instruction.name).replace("_", " ")
        shapes = " ".join(map(str, instruction.shapes[:3])) + (" ..." if len(instruction.shapes) > 3 else "")
        return f"{what} {shapes}"

    def _attention_flops(self, instruction: Instruction) -> int:
        """Counts two products forward, five backward (FlashAttention-2, arXiv:2307.08691); half of each under a causal mask."""
        sizes = re.search(r'"intermediate_tensor_shape":\{"dimensions":\[([^\]]*)\]', instruction.text)
        query = self._shape(instruction, 0)
        if sizes is None or query is None:
            return 0
        products = 5 if "Backward" in instruction.target else 2
        flops = products * 2 * math.prod(map(int, re.findall(r"\d+", sizes[1]))) * query.dims[-1]
        return flops // 2 if "CAUSAL" in instruction.text else flops

    def _grouped_flops(self, instruction: Instruction) -> int:
        """Counts a kernel's grouped product as if every row were of a group; 0 for what is no such kernel."""
        if instruction.opcode != "custom-call" or not _GROUPED.search(instruction.op_name):
            return 0
        given = [operand.shapes[0] for operand in self._operands(instruction)]
        rows, *others = [shape for shape in (*given, *instruction.shapes) if len(shape.dims) == 2]
        return 2 * math.prod(rows.dims) * others[0].dims[1]

    def _operands(self, instruction: Instruction) -> list[Instruction]:
        home = self.home[instruction.name].instructions
        return [home[name] for name in instruction.operands if name in home]

    def _shape(self, instruction: Instruction, operand: int) -> Shape | None:
        given = self.home[instruction.name].instructions.get((*instruction.operands, "", "")[operand])
        return given.shapes[0] if given else None

    @cached_property
    def of_batch(self) -> set[str]:
        """Names of instructions that depend on an argument that is not updated in place: on the batch, not on the state."""
        found: set[str] = set()
        computation = self.computations[self.entry]
        updated = {int(parameter) for _, parameter, _ in self._aliases}
        self._spread(computation, [n not in updated for n in range(len(computation.parameters()))], found)
        return found

    def _spread(self, computation: Computation, arguments: Sequence[Any], found: set[str]) -> Any:
        """Goes through a computation with what depends on the batch: a bool an argument, a list of those for a tuple."""
        values: dict[str, Any] = {}
        numbers = {p.name: n for n, p in enumerate(computation.parameters())}
        for i in computation.instructions.values():
            given = [values.get(name, False) for name in i.operands]
            called = [self.computations[name] for name in i.called if name in self.computations]
            if i.opcode == "parameter":
                value = arguments[numbers[i.name]] if numbers[i.name] < len(arguments) else False
            elif i.opcode == "tuple":
                value = given
            elif i.opcode == "get-tuple-element" and isinstance(given[0], list):
                value = given[0][int(re.findall(r"index=(\d+)", i.text)[0])]
            elif i.opcode == "while":
                value = given[0]
                body = next(c for c in called if f"body=%{c.name}" in i.text or f"body={c.name}" in i.text)
                # What depends can only grow, so this ends.
                while (after := _either(value, self._spread(body, [value], found))) != value:
                    value = after
            elif i.opcode == "conditional":
                outs = [self._spread(c, [g], found) for c, g in zip(called, given[1:], strict=False)]
                value = _either(*outs) if outs else any(map(_any, given))
                value = _either(value, given[0]) if not isinstance(value, list) else value
            elif i.opcode in ("fusion", "call", "async-start") and called:
                value = self._spread(called[0], given, found)
            else:
                value = any(map(_any, given))
            values[i.name] = value
            if _any(value):
                found.add(i.name)
        return values[computation.root.name]


def _any(value: Any) -> bool:
    return any(map(_any, value)) if isinstance(value, list) else bool(value)


def _either(*values: Any) -> Any:
    if all(isinstance(value, list) for value in values):
        return [_either(*parts) for parts in zip(*values, strict=True)]
    return any(map(_any, values))
