import triton, triton.language as tl, re, sys
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice
@triton.jit
def A(p0, p1, p2, o0, o1, o2, o3, o4, xnumel, r0_numel, XBLOCK: tl.constexpr):
    xnumel = 160
    R0_BLOCK: tl.constexpr = 64
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    r0_index = tl.arange(0, R0_BLOCK)[None, :]
    r0_mask = r0_index < 49
    r0_1 = r0_index
    x0 = xindex
    tmp0 = tl.load(p0 + (x0 + 160*r0_1), r0_mask & xmask, other=0.0)
    tmp1 = tl.load(p1 + (x0 + 160*r0_1), r0_mask & xmask, other=0.0)
    tmp2 = tl.load(p2 + (x0 + 160*r0_1), r0_mask & xmask, other=0.0)
    tmp23 = tl.load(o1 + (x0), xmask, eviction_policy='evict_last')
    tmp30 = tl.load(o2 + (x0), xmask, eviction_policy='evict_last')
    tmp10, tmp11, tmp12 = triton_helpers.welford(tmp0, tmp1, tmp2, 1)
    tmp13 = tmp10[:, None]
    tmp14 = tmp11[:, None]
    tmp16 = tl.full([1, 1], 6272.0, tl.float32)
    tmp17 = (tmp14 / tmp16)
    tmp18 = tl.full([1, 1], 1e-05, tl.float32)
    tmp19 = tmp17 + tmp18
    tmp20 = libdevice.rsqrt(tmp19)
    tmp21 = tl.full([1, 1], 0.1, tl.float32)
    tmp22 = tmp13 * tmp21
    tmp24 = tl.full([1, 1], 0.9, tl.float32)
    tmp25 = tmp23 * tmp24
    tmp26 = tmp22 + tmp25
    tmp27 = tl.full([1, 1], 1.0000006228081046, tl.float32)
    tmp28 = tmp17 * tmp27
    tmp29 = tmp28 * tmp21
    tmp31 = tmp30 * tmp24
    tmp32 = tmp29 + tmp31
    tl.store(o0 + (x0), tmp20, xmask)
    tl.store(o1 + (x0), tmp26, xmask)
    tl.store(o2 + (x0), tmp32, xmask)
    tl.store(o3 + (x0), tmp13, xmask)
    tl.store(o4 + (x0), tmp14, xmask)
@triton.jit
def B(p0, p1, p2, p3, p4, o0, xnumel, XBLOCK: tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    x2 = xindex
    x0 = (xindex % 160)
    tmp0 = tl.load(p0 + (x2), None).to(tl.float32)
    tmp2 = tl.load(p1 + (x0), None, eviction_policy='evict_last')
    tmp4 = tl.load(p2 + (x0), None, eviction_policy='evict_last')
    tmp11 = tl.load(p3 + (x0), None, eviction_policy='evict_last')
    tmp13 = tl.load(p4 + (x0), None, eviction_policy='evict_last')
    tmp1 = tmp0.to(tl.float32)
    tmp3 = tmp1 - tmp2
    tmp5 = tl.full([1], 6272.0, tl.float32)
    tmp6 = (tmp4 / tmp5)
    tmp7 = tl.full([1], 1e-05, tl.float32)
    tmp8 = tmp6 + tmp7
    tmp9 = libdevice.rsqrt(tmp8)
    tmp10 = tmp3 * tmp9
    tmp12 = tmp10 * tmp11
    tmp14 = tmp12 + tmp13
    tmp15 = tmp14.to(tl.float32)
    tl.store(o0 + (x2), tmp15, None)
t=GPUTarget('cuda',90,32)
for fn,c in ((A,{'XBLOCK':8}),(B,{'XBLOCK':1024})):
    names=fn.arg_names
    sig={n: ('i32' if 'numel' in n else 'constexpr' if n=='XBLOCK' else '*bf16' if fn is B and n in('p0','o0') else '*fp32') for n in names}
    k=triton.compile(ASTSource(fn,sig,c),target=t,options={'num_warps':4,'enable_fp_fusion':True})
    ptx=k.asm['ptx']
    print(fn.__name__,[l.strip() for l in ptx.splitlines() if re.search(r'div|rsqrt|fma|add\S*f32|mul\S*f32',l)][-24 if fn is A else -40:])
    s=k.asm['sass']
    ls=[l for l in s.splitlines()]
    idx=[i for i,l in enumerate(ls) if 'MUFU' in l]
    for i in idx[-3:]: print('\n'.join(ls[max(0,i-14):i+5])); print('--')
