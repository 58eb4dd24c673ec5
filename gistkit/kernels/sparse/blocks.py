"""Slots' items close together and narrow at once: codes under an exponent for every SCALE_BLOCK packed values.

A warp owns whole blocks of packed values: it gathers their items in shared memory (sparse_places.py) and encodes them
from there, an octet a lane. Packed first and encoded then, values are written and read once more: up to 1.7 times the
time on an H200. Where nothing is encoded, compact.py is the faster one.
"""

# tl.static_range is unrolled by the compiler: to a type checker it is no iterator
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import ceil_div, scale_count
from gistkit.kernels.narrow.rounding import encoding_factor, exponent_byte, finite_amax, finite_key, to_scaled_code
from gistkit.kernels.sparse.arguments import bits_of, check_blocks, value_dtype
from gistkit.kernels.sparse.ends import ends_and_heads
from gistkit.kernels.sparse.places import PLACES, program_places, stage_places
from gistkit.kernels.sparse.values import BLOCK, TRITON_DTYPES
from gistkit.kernels.warp.lanes import LANES, asm_level, launch_warps
from gistkit.kernels.warp.octet_codes import hardware_word
from gistkit.kernels.warp.octets import CHUNK, OCTET, item_of, store_words
from gistkit.kernels.warp.stage import clear_stage, open_stage, unstage_words, warp_sync

PIECES = 2
"""Octets of a lane that are loaded before the first is used; with four, bf16 took 4 % longer on an H200."""
_LARGEST_OF_16 = tl.constexpr(
    "{ .reg .b32 other; mov.b32 $0, $1; "
    + " ".join(f"shfl.sync.bfly.b32 other, $0, {step}, 31, 0xffffffff; max.u32 $0, $0, other;" for step in (8, 4, 2, 1))
    + " }"
)


@triton.jit
def _scaled_octet(words, FMT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """(codes, b): words of the codes of an octet's patterns under b, the exponent byte of 16 neighbouring lanes'."""
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    PER_WORD: tl.constexpr = 4 if FMT == "fp8" else 2
    key = tl.zeros((LANES,), tl.uint32)
    for i in tl.static_range(OCTET):
        key = tl.maximum(key, finite_key(item_of(words, 0, i, XB).to(DTYPE, bitcast=True)))
    key = tl.inline_asm_elementwise(_LARGEST_OF_16, "=&r,r", [key], dtype=tl.uint32, is_pure=False, pack=1)
    b = exponent_byte(finite_amax(key), FMT)
    factor = encoding_factor(b, FMT)
    codes = ()
    for first in tl.static_range(0, OCTET, PER_WORD):
        if FMT == "fp8" and ASM >= 90 and XB == 2:
            word = hardware_word(words, first // 2, factor, DTYPE)
        else:
            word = tl.zeros((LANES,), tl.int32)
            for i in tl.static_range(PER_WORD):
                item = item_of(words, 0, first + i, XB).to(DTYPE, bitcast=True)
                word |= to_scaled_code(item, factor, FMT) << (i * 32 // PER_WORD)
        codes += (word,)
    return codes, b


@triton.jit
def _flush_blocks(stage, codes_ptr, exponents_ptr, stop, FMT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The stage's first ``stop`` patterns, +0 behind them, as codes with the exponents of their blocks."""
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    CB: tl.constexpr = codes_ptr.dtype.element_ty.primitive_bitwidth // 8
    lane = tl.arange(0, LANES)
    for first in tl.static_range(0, PLACES, CHUNK):
        place = lane * OCTET + first
        codes, b = _scaled_octet(unstage_words(stage + place * XB, 2 * XB), FMT, DTYPE, ASM)
        tl.store(exponents_ptr + place // BLOCK, b.to(tl.uint8), (place % BLOCK == 0) & (place < stop))
        store_words(codes_ptr + place, codes, place + OCTET <= stop)
        if stop % OCTET != 0:
            for i in tl.static_range(OCTET):
                code = codes[i * CB // 4] >> (8 * (i * CB % 4))
                mine = (place + i < stop) & (place + OCTET > stop)
                tl.store(codes_ptr + place + i, code.to(codes_ptr.dtype.element_ty), mine)


@triton.jit(do_not_specialize=["total", "slots"])
def pack_blocks_kernel(
    values_ptr, counts_ptr, ends_ptr, heads_ptr, codes_ptr, exponents_ptr, total, slots,
    STRIDE: tl.constexpr, FMT: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """PLACES codes and their blocks' exponents; see compact_kernel."""
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    base, stop, slot = program_places(heads_ptr, ends_ptr, total, slots)
    lane = tl.arange(0, LANES)
    stage = open_stage(lane, XB)
    if stop < PLACES:
        clear_stage(stage, lane, PLACES * XB)
        warp_sync(stage)
    stage_places(stage, values_ptr, counts_ptr, ends_ptr, slot, slots, base, stop, STRIDE, WIDE, PIECES)
    _flush_blocks(warp_sync(stage), codes_ptr + base, exponents_ptr + base // BLOCK, stop, FMT, DTYPE, ASM)


def compact_blocks(
    scratch: torch.Tensor, counts: torch.Tensor, stride: int, total: int, fmt: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes[total], exponents uint8[ceil(total/128)]): what ``narrow_encode`` per block makes of packed values.

    scratch: fp32/bf16/fp16[stride * slots]; counts: int16[slots]; total: their sum; fmt: ``fp16`` (codes int16) or
    ``fp8`` (uint8). Does not synchronise.
    """
    check_blocks("compact_blocks", scratch, counts, stride, total, fmt)
    codes = torch.empty((total,), dtype=value_dtype(fmt, scratch.dtype), device=scratch.device)
    exponents = torch.empty((scale_count(total, "block"),), dtype=torch.uint8, device=scratch.device)
    programs = ceil_div(total, PLACES.value)
    launch_warps(
        pack_blocks_kernel, programs, scratch,
        bits_of(scratch), counts, *ends_and_heads(counts, programs, PLACES.value), codes, exponents,
        total, counts.numel(),
        STRIDE=stride, FMT=fmt, DTYPE=TRITON_DTYPES[scratch.dtype], WIDE=scratch.data_ptr() % 16 == 0, PIECES=PIECES,
        ASM=asm_level(scratch),
    )  # fmt: skip
    return codes, exponents
