"""KernelText: what CUDA's compiler is handed of paged_source, whichever kernel it is for."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path

import mlx.core as mx

SOURCE = Path(__file__).parent / "paged_source"
TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.uint32: "unsigned",
}
"""CUDA's words for numbers."""


@cache
def header(names: tuple[str, ...]) -> str:
    """Files by path, since MLX hashes this text at every call. It keeps what it compiled on disk by
    that hash, which is not one of what is included: so that is said here.
    """
    digest = sha256(b"".join((SOURCE / name).read_bytes() for name in names)).hexdigest()
    return f"// {digest[:16]}\n" + "".join(f'#include "{SOURCE / name}"\n' for name in names)
