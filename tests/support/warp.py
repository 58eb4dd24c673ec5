"""Runs a compiled kernel's PTX, one warp a program, on numpy arrays: the half of a kernel that needs a GPU otherwise.

Covers what the kernels of sparse storage are made of; conversions and pairs of halves come from tests/support/ptx.py.
Lanes go
in step, so a branch must go one way in all of them. Registers hold bits as uint64. A load may reach past an array's end
within its last 16 bytes, as the kernels' wide loads do; any other access outside an array is an IndexError, and a
misaligned one. Shared memory and registers start out as garbage.
"""

import re
from functools import cache

import numpy as np

from tests.support.ptx import INSTRUCTIONS

LANES = 32
GARBAGE = 0xA5
_BASE, _SHARED = 1 << 16, 1 << 8
_STATEMENT = re.compile(r"(?:@(?P<guard>!?[%\w]+)\s+)?(?P<name>[a-z][\w.:]*)\s*(?P<rest>.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,{\[]*")
_UNSET = np.full(LANES, 0xA5A5A5A5A5A5A5A5, np.uint64)
_SIGNED = {16: np.int16, 32: np.int32, 64: np.int64}
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
_COMPARE |= {"ge": np.greater_equal}

_BINARY = {"add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_BINARY |= {"min": np.minimum, "max": np.maximum}
_LITERAL = re.compile(r"-?\d+|-?0x[0-9A-Fa-f]+U?|0f[0-9A-Fa-f]{8}")


@cache
def _literal(operand: str) -> np.ndarray | None:
    """The lanes' bits of a number, None for a register."""
    if not _LITERAL.fullmatch(operand):
        return None
    number = int(operand[2:], 16) if operand.startswith("0f") else int(operand.rstrip("U"), 0)
    return np.full(LANES, number % 2**64, np.uint64)


@cache
def _parsed(ptx: str) -> tuple[list[tuple[str, str, list[str]]], dict[str, int]]:
    """(guard, name, operands) of every instruction of the entry's body, and the labels' positions."""
    text = re.sub(r"//[^\n]*|\.loc[^\n]*|(?<!\w)\.(?:reg|shared)[^;]*;", "", ptx[ptx.index(".reqntid") :])
    text = text[text.index("{") + 1 : text.index("$L__func_end0:")]
    text = re.sub(r"([\w$]+:)(?!:)", r"\1;", text)
    program, labels = [], {}
    for piece in text.split(";"):
        piece = piece.strip().removeprefix("{").strip().removeprefix("}").strip().removeprefix("{").strip()
        if piece.endswith(":"):
            labels[piece[:-1]] = len(program)
        elif piece and piece != "}":
            found = _STATEMENT.fullmatch(piece)
            assert found, piece
            operands = [o.strip() for o in _OPERAND.findall(found["rest"])]
            program.append((found["guard"] or "", found["name"], operands))
    return program, labels


class Warp:
    """One program: registers by name, shared memory, and the global arrays that all programs share."""

    def __init__(self, memory: np.ndarray, ends: list[tuple[int, int]], parameters: dict[str, int], program: int):
        self.memory, self.ends, self.parameters = memory, ends, parameters
        self.shared = np.full(1 << 16, GARBAGE, np.uint8)
        self.registers = {"%ctaid.x": np.full(LANES, program), "%tid.x": np.arange(LANES)}
        self.registers |= {"%nctaid.x": np.full(LANES, parameters["programs"]), "stage": np.full(LANES, _SHARED)}
        self.registers = {name: value.astype(np.uint64) for name, value in self.registers.items()}

    def read(self, operand: str, bits: int = 64, signed: bool = False) -> np.ndarray:
        if operand.startswith("{"):
            parts = [self.read(part.strip(), 16) for part in operand[1:-1].split(",")]
            return parts[0] | parts[1] << np.uint64(16) if len(parts) > 1 else parts[0]
        value = _literal(operand)
        if value is None:
            value = self.registers.get(operand, _UNSET)
        value = value & np.uint64(2**bits - 1)
        return value.astype(f"uint{bits}").view(_SIGNED[bits]).astype(np.int64) if signed else value

    def write(self, target: str, value: np.ndarray, guard: np.ndarray, bits: int = 64) -> None:
        value = value.astype(np.uint64) & np.uint64(2**bits - 1)
        if target.startswith("{"):
            parts = [part.strip() for part in target[1:-1].split(",")]
            for i, part in enumerate(parts):
                self.write(part, value >> np.uint64(16 * i), guard, 16 if len(parts) > 1 else bits)
        elif target != "_":
            self.registers[target] = np.where(guard, value, self.read(target))

    def access(self, name: str, operands: list[str], guard: np.ndarray) -> None:
        kind, space, *shape = name.split(".")
        count = int(shape[0][1:]) if shape[0].startswith("v") else 1
        bits = int(shape[-1][1:])
        size = bits // 8
        operand, registers = (operands[1], operands[0]) if kind == "ld" else (operands[0], operands[1])
        address, _, offset = operand[1:-1].strip().partition("+")
        at = self.read(address.strip()).astype(np.int64) + int(offset or 0)
        space_bytes = self.shared if space == "shared" else self.memory
        names = [r.strip() for r in registers.strip("{} ").split(",")]
        at = at[guard]
        self.check(space, at, size * count, kind == "st")
        for i, register in enumerate(names):
            where = at[:, None] + np.arange(i * size, (i + 1) * size)
            if kind == "st":
                octets = self.read(register, bits)[guard, None].view(np.uint8)
                space_bytes[where] = octets[:, :size]
                continue
            octets = np.zeros((LANES, 8), np.uint8)
            octets[guard, :size] = space_bytes[where]
            loaded = octets.view(np.uint64)[:, 0]
            if shape[-1].startswith("s"):
                loaded = loaded.astype(f"uint{bits}").view(f"int{bits}")
            self.write(register, loaded, guard)

    def check(self, space: str, first: np.ndarray, size: int, store: bool) -> None:
        room = [(_SHARED, _SHARED + self.parameters["shared"])] if space == "shared" else self.ends
        begins, ends = np.array(room).T
        last = ends if store else (ends + 15) // 16 * 16
        first = first[:, None]
        fits = (first % size == 0) & (begins <= first) & (first < ends) & (first + size <= last)
        if not fits.any(1).all():
            raise IndexError(
                f"{size} bytes at {first[~fits.any(1)][0, 0]:#x} of {space} memory: misaligned, or no array there"
            )

    def step(self, name: str, operands: list[str], guard: np.ndarray) -> None:
        if name.startswith(("ld.param", "bar.warp")):
            if name.startswith("ld.param"):
                value = self.parameters[operands[1].strip("[]").rsplit("_", 1)[-1]]
                self.write(operands[0], np.full(LANES, value % 2**64, np.uint64), guard)
        elif name.startswith(("ld.", "st.")):
            self.access(name, operands, guard)
        elif name.startswith("shfl.sync"):
            self.shuffle(name, operands, guard)
        elif name.startswith("redux.sync"):
            lanes = self.read(operands[1], 32, name.endswith("s32"))
            assert ".max." in name and guard.all()
            self.write(operands[0], np.full(LANES, lanes.max()), guard, 32)
        elif name in INSTRUCTIONS and name.split(".")[0] not in ("mov", "and", "or", "add", "shl", "shr"):
            kind = np.uint16 if name == "cvt.f32.f16" else np.uint32
            sources = [self.read(o, 32).astype(kind) for o in operands[1:]]
            self.write(operands[0], INSTRUCTIONS[name](*sources), guard, 32)
        else:
            self.integer(name, operands, guard)

    def shuffle(self, name: str, operands: list[str], guard: np.ndarray) -> None:
        target, _, flag = operands[0].partition("|")
        lane, by = np.arange(LANES), self.read(operands[2], 32).astype(np.int64)
        source = lane - by if ".up." in name else lane ^ by if ".bfly." in name else by & 31
        valid = source >= 0
        value = self.read(operands[1], 32)[np.where(valid, source, lane)]
        if flag:
            self.write(flag, valid, guard)
        self.write(target, value, guard)

    def integer(self, name: str, operands: list[str], guard: np.ndarray) -> None:
        kind, *modes = name.split(".")
        bits = int(modes[-1][1:]) if modes[-1] != "pred" else 1
        signed = modes[-1].startswith("s")
        if kind == "setp":
            a, b = (self.read(o, bits, signed) for o in operands[1:3])
            self.write(operands[0], _COMPARE[modes[0]](a, b), guard)
            return
        if kind == "selp":
            on = self.read(operands[3]).astype(bool)
            self.write(operands[0], np.where(on, self.read(operands[1]), self.read(operands[2])), guard, bits)
            return
        if kind == "cvt":
            target_bits = int(modes[-2][1:])
            self.write(operands[0], self.read(operands[1], bits, signed), guard, target_bits)
            return
        if kind == "mov" or kind == "neg":
            value = self.read(operands[1], bits)
            self.write(operands[0], value if kind == "mov" else 0 - value, guard, bits)
            return
        wide = "wide" in modes
        sizes = (bits, bits, 64 if wide else bits)
        values = [self.read(o, size, signed) for o, size in zip(operands[1:], sizes, strict=False)]
        self.write(operands[0], _integer(kind, modes, bits, *values), guard, 64 if wide else bits)

    def run(self, program: list[tuple[str, str, list[str]]], labels: dict[str, int]) -> None:
        position = 0
        while position < len(program):
            guard_name, name, operands = program[position]
            guard = np.ones(LANES, bool)
            if guard_name:
                guard = (self.read(guard_name.lstrip("!")).astype(np.uint64) & np.uint64(1)).astype(bool)
                guard = ~guard if guard_name.startswith("!") else guard
            position += 1
            if name.startswith("bra"):
                assert guard.all() or not guard.any(), "a branch that the lanes do not take together"
                position = labels[operands[0]] if guard.all() else position
            elif name == "ret":
                return
            else:
                self.step(name, operands, guard)


def _integer(kind: str, modes: list[str], bits: int, a: np.ndarray, b: np.ndarray = _UNSET, c=0) -> np.ndarray:
    """Of int64 or uint64 lanes, of which the lowest bits count. numpy's shifts by the width or more leave nothing, or
    the sign."""
    if kind in ("mul", "mad"):
        assert bits <= 32 or "lo" in modes
        return (a * b >> bits if "hi" in modes else a * b) + c
    if kind == "shl":
        return a << b
    if kind == "shr":
        return a >> (b & 0xFFFFFFFF)
    if kind == "shf" and modes[:2] == ["l", "wrap"]:
        return (b << 32 | a) << c % 32 >> 32
    if kind == "bfe":
        return a >> b & (1 << c) - 1
    if kind == "popc":
        return np.unpackbits(a[:, None].view(np.uint8), axis=1).sum(1)
    return ~a if kind == "not" else _BINARY[kind](a, b)


def bases(arguments: list[np.ndarray | int]) -> list[int]:
    """The addresses that the arrays among a launch's arguments get, multiples of 256, and one behind the last."""
    at = [_BASE]
    for argument in arguments:
        if not isinstance(argument, int):
            at.append(at[-1] + argument.nbytes + 512 - argument.nbytes % 256)
    return at


def launch(ptx: str, arguments: list[np.ndarray | int], programs: int) -> None:
    """Run programs one after the other; arrays are written in place, see :func:`bases`."""
    parsed, labels = _parsed(ptx)
    ends, at = [], bases(arguments)
    parameters = {"programs": programs, "shared": max(map(int, re.findall(r"stage\[(\d+)\]", ptx)), default=0)}
    for i, argument in enumerate(arguments):
        parameters[str(i)] = argument if isinstance(argument, int) else at[len(ends)]
        if not isinstance(argument, int):
            ends.append((at[len(ends)], at[len(ends)] + argument.nbytes))
    memory = np.full(at[-1], GARBAGE, np.uint8)
    arrays = [a for a in arguments if not isinstance(a, int)]
    for array, (begin, end) in zip(arrays, ends, strict=True):
        memory[begin:end] = array.view(np.uint8)
    for program in range(programs):
        Warp(memory, ends, parameters, program).run(parsed, labels)
    for array, (begin, end) in zip(arrays, ends, strict=True):
        array.view(np.uint8)[:] = memory[begin:end]
