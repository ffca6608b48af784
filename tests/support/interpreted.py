"""Functions of libdevice for Triton's interpreter, which cannot call the library."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def rsqrt(x):  # type: ignore[no-untyped-def]
    return 1.0 / tl.sqrt(x)
