"""The kernels of FP8 products compiled for GPUs that are not there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphopt.kernels.fp8_matmul_launch import ALIGNMENT_BYTES, Laid, Specialization, lay, specialize
from graphopt.kernels.fp8_matmul_tiles import Tile
from graphopt.kernels.fp8_product import Product
from graphopt.kernels.fp8_support import support_of
from tests.support.kernel_targets import resources

TRITON_NAMES = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
# What a program may use of shared memory, by compute capability (CUDA programming guide, table of capabilities).
SHARED_BYTES = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# The FP8 matrix instruction; and that of float16, which must not be there.
FP8_INSTRUCTIONS = {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA", 120: "QMMA"}
OTHER_INSTRUCTIONS = ("HMMA", "HGMMA", "UTCHMMA")
_NUM_PROGRAMS = 132
_OPERATION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?([A-Z0-9]+)", re.MULTILINE)


@dataclass(frozen=True)
class CompiledProduct:
    """What a kernel came to. ``operations``: how often each stands in the machine code."""

    ptx: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    operations: Counter[str]


def compile_product(product: Product, tile: Tile, arch: int) -> CompiledProduct:
    """The kernel of ``product``, as the launcher would compile it for sm_``arch``, in ``tile``."""
    support = support_of(divmod(arch, 10))
    a, b = lay(product.a, support), lay(product.b.transpose, support)
    chosen = specialize(product, tile, support, a, b)
    values = _arguments(product, chosen, a, b)
    constants = chosen.constants(_NUM_PROGRAMS)
    signature, attributes = dict.fromkeys(constants, "constexpr"), {}
    for position, name in enumerate(chosen.kernel.arg_names):
        if name in constants:
            continue
        value = values[name]
        if isinstance(value, str):
            signature[name] = value
        elif value == 1 and name != "M":
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
        if signature[name].startswith("*") or (isinstance(value, int) and value % ALIGNMENT_BYTES == 0 and name != "M"):
            attributes[(position,)] = [["tt.divisibility", ALIGNMENT_BYTES]]
    source = ASTSource(
        fn=chosen.kernel,
        signature={name: signature[name] for name in chosen.kernel.arg_names},
        constexprs=constants,
        attrs=attributes,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(chosen.options()))
    used = resources(compiled.asm["cubin"])
    return CompiledProduct(compiled.asm["ptx"], *used, compiled.metadata.shared, operations(compiled.asm["cubin"]))


def operations(cubin: bytes) -> Counter[str]:
    """How often each operation stands in the machine code, without its modifiers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return Counter(_OPERATION.findall(done.stdout))


def _arguments(product: Product, chosen: Specialization, a: Laid, b: Laid) -> dict[str, Any]:
    """For each argument of the kernel: its type if it is a pointer or descriptor, else its value."""
    bias_dtype = torch.float32 if product.bias is None else product.bias.dtype
    found: dict[str, Any] = {"bias_ptr": f"*{TRITON_NAMES[bias_dtype]}"}
    for name, laid, operand, size in (
        ("a", a, product.a, chosen.tile.m),
        ("b", b, product.b.transpose, chosen.tile.n),
    ):
        piece = [size, chosen.tile.k] if laid.is_k_last else [chosen.tile.k, size]
        found[name] = _type(laid.rows.dtype, piece if chosen.loads_by_tma else None)
        found |= {
            f"{name}_stride": laid.rows.stride(0),
            f"{name}_scale_ptr": "*fp32",
            f"{name}_scale_stride": operand.scale.stride(0),
            f"{name}_scale_stride_k": operand.scale.stride(1) if operand.grid[1] else 0,
        }
    found["c"] = _type(product.dtype, [chosen.tile.m, chosen.tile.n] if chosen.stores_by_tma else None)
    k = a.rows.shape[1] if a.is_k_last else product.k
    return found | {"c_stride": product.n, "M": product.m, "N": product.n, "K": k}


def _type(dtype: torch.dtype, piece: list[int] | None) -> str:
    name = TRITON_NAMES[dtype]
    return f"*{name}" if piece is None else f"tensordesc<{name}{piece}>"
