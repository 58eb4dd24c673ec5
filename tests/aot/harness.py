"""Compile a Triton kernel for a GPU that is not there and read what the machine code says.

    from tests.aot.harness import compile_kernel, per_element
    c = compile_kernel(_kernel, {"x_ptr": "*fp32", "y_ptr": "*u8", "n": "i64"}, {"BLOCK": 1024}, capability=90)
    assert c.spills == 0 and c.barriers == 0 and c.loads_128 == 2
    assert per_element(c, 1024, num_warps=4) <= 28

Counts are *static*: every instruction of the listing once. For straight-line kernels that is what a warp runs. For a
kernel with a loop, take :func:`loop_body` (the body of the largest backward branch) and divide by the elements of one
iteration: ``per_element(loop_body(c), elements_per_iteration, num_warps)``; :func:`loops` gives all bodies, the largest
first. A body contains the loops nested in it, counted once.

``TRITON_INTERPRET`` must not be set in this process: the interpreter replaces the decorator and nothing compiles.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90, 100)
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
INSTRUCTIONS_PER_BYTE = 6.8
"""What an H200 issues for each byte moved, at 4.3 TB/s: 28 an element of an fp32 mask, 34 from fp32 to fp8."""

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?P<text>.*?)\s*;")
_LABEL = re.compile(r"^\s*(?P<label>\.L_\w+):")
_TARGET = re.compile(r"\(?(?P<label>\.L_\w+)\)")
_REGISTERS = re.compile(r"\bREG:(\d+)")
_STACK = re.compile(r"\bSTACK:(\d+)")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one GPU. Its machine code is taken apart when it is first asked for.

    ``sass_lines`` are the instructions alone (predicate, opcode, operands), without NOPs and the self-branch that pads
    the end; ``labels`` their branch targets as (label, position). ``loads_128`` and ``stores_128`` count global
    accesses of at least 16 bytes a lane, ``loads`` and ``stores`` all global ones. ``spills`` counts accesses to local
    memory (LDL, STL), of which there are none without a stack; ``barriers`` counts BAR.
    """

    ptx: str
    cubin: bytes
    shared_bytes: int

    @cached_property
    def usage(self) -> str:
        return _tool(self.cubin, knobs.nvidia.cuobjdump.path, "-res-usage")

    @property
    def registers(self) -> int:
        return int(_REGISTERS.findall(self.usage)[-1])

    @property
    def stack_bytes(self) -> int:
        return int(_STACK.findall(self.usage)[-1])

    @property
    def sass_lines(self) -> tuple[str, ...]:
        return _disassembled(self.cubin)[0]

    @property
    def labels(self) -> tuple[tuple[str, int], ...]:
        return _disassembled(self.cubin)[1]

    @property
    def instructions(self) -> int:
        return len(self.sass_lines)

    def count(self, opcode: str) -> int:
        """Instructions whose opcode starts with the given text, such as ``SHFL`` or ``LDG.E.128``."""
        return sum(opcode_of(line).startswith(opcode) for line in self.sass_lines)

    @property
    def loads(self) -> int:
        return self.count("LDG")

    @property
    def stores(self) -> int:
        return self.count("STG")

    @property
    def loads_128(self) -> int:
        return _wide(self.sass_lines, "LDG")

    @property
    def stores_128(self) -> int:
        return _wide(self.sass_lines, "STG")

    @property
    def spills(self) -> int:
        return self.count("LDL") + self.count("STL") if self.stack_bytes else 0

    @property
    def barriers(self) -> int:
        return self.count("BAR")


def opcode_of(line: str) -> str:
    """The opcode with its modifiers: ``LDG.E.128`` of ``@!P0 LDG.E.128 R4, desc[UR4][R2.64]``."""
    words = line.split()
    return words[1] if words[0].startswith("@") else words[0]


def compile_kernel(
    fn: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    capability: int,
    num_warps: int = 4,
    divisible: Iterable[str] | None = None,
    **options: Any,
) -> Compiled:
    """Compile a ``triton.jit`` function for sm_``capability``; Triton's disk cache applies.

    ``signature`` maps the other arguments to Triton types (``*fp32``, ``*bf16``, ``*i32``, ``*u8``, ``i32``, ``i64``,
    ``fp32``). ``divisible`` names the arguments known to be multiples of 16, as the launcher finds out at run time; by
    default every pointer (fresh allocations are), no integer. ``enable_fp_fusion`` is False unless given in options.
    """
    if divisible is None:
        divisible = [name for name, kind in signature.items() if kind.startswith("*")]
    types = {name: "constexpr" if name in constexprs else signature[name] for name in fn.arg_names}
    attrs = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    built = triton.compile(
        ASTSource(fn, types, dict(constexprs), attrs),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": False, **options},
    )
    return Compiled(built.asm["ptx"], built.asm["cubin"], built.metadata.shared)


def assert_lean(compiled: Compiled, instructions: float, bytes_moved: float) -> None:
    """No stack, subnormals survive, and no more instructions an element than its bytes leave time for."""
    assert compiled.stack_bytes == 0
    assert compiled.count("DSETP") == 0, "fp64 takes 64 times as long on many GPUs"
    assert not any(".FTZ" in line for line in compiled.sass_lines), "subnormals survive"
    assert instructions <= INSTRUCTIONS_PER_BYTE * bytes_moved


def assert_wide_addresses(compiled: Compiled) -> None:
    """The program's number is widened to 64 bits before it is multiplied: it is what a tensor is walked by."""
    program = re.search(r"mov\.u32\s+(%r\d+), %ctaid\.x", compiled.ptx)
    assert program
    lines = (line for line in compiled.ptx.splitlines() if re.search(rf"{program[1]}\b", line))
    uses = [line for line in lines if "%ctaid" not in line]
    assert uses and all(re.search(r"\.wide\.|cvt\.\w64", use) for use in uses), uses


def per_element(compiled: Compiled | Sequence[str], elements_per_program: int, num_warps: int = 4) -> float:
    """Lane-instructions an element: each of the listing's instructions runs once in every lane of the program."""
    lines = compiled.sass_lines if isinstance(compiled, Compiled) else compiled
    return len(lines) * num_warps * 32 / elements_per_program


def loops(compiled: Compiled) -> list[tuple[str, ...]]:
    """The body of every backward branch, from its target to the branch, the largest first."""
    labels = dict(compiled.labels)
    bodies = []
    for position, line in enumerate(compiled.sass_lines):
        start = _branch_target(line, labels)
        if start is not None and start <= position:
            bodies.append(compiled.sass_lines[start : position + 1])
    return sorted(bodies, key=len, reverse=True)


def loop_body(compiled: Compiled) -> tuple[str, ...]:
    """The largest loop body. Raises ValueError for a kernel without a loop."""
    bodies = loops(compiled)
    if not bodies:
        raise ValueError("loop_body: the kernel has no backward branch; use per_element(compiled, ...)")
    return bodies[0]


def _branch_target(line: str, labels: dict[str, int]) -> int | None:
    if not opcode_of(line).startswith("BRA"):
        return None
    found = _TARGET.search(line)
    return labels.get(found["label"]) if found else None


def _wide(lines: Iterable[str], opcode: str) -> int:
    opcodes = (opcode_of(line) for line in lines)
    return sum(o.startswith(opcode) and any(part in ("128", "256") for part in o.split(".")) for o in opcodes)


@lru_cache(maxsize=256)
def _disassembled(cubin: bytes) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    # without its dataflow analysis, which takes 0.1 of 0.35 s and is for branches over the branch stack only
    return _parse(_tool(cubin, knobs.nvidia.nvdisasm.path, "-c", "-ndf"))


def _tool(cubin: bytes, *command: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([*command, file.name], check=True, capture_output=True, text=True).stdout


def _parse(listing: str) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """Instructions and label positions of nvdisasm's listing, padding left out."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    pending: list[str] = []
    for raw in listing.splitlines():
        if label := _LABEL.match(raw):
            labels[label["label"]] = len(lines)
            pending.append(label["label"])
        elif instruction := _INSTRUCTION.match(raw):
            text = instruction["text"]
            target = _TARGET.search(text)
            padding = opcode_of(text) == "NOP" or (
                opcode_of(text) == "BRA" and target is not None and target["label"] in pending
            )
            pending.clear()
            if not padding:
                lines.append(text)
    return tuple(lines), tuple(labels.items())
