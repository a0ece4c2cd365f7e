"""How FP8 products are cut into tiles on each kind of GPU: a table of candidates, and the classes of shapes.

None of it was measured on a GPU: the table holds what registers, shared memory and the matrix units leave room for
(each entry is compiled in the tests: no spills, the FP8 instruction is there, shared memory suffices), and the device
chooses among the candidates when it first meets a class of shapes. The first candidate runs where nothing can be
measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from graphopt.kernels.fp8_product import SCALE_BLOCK, Product
from graphopt.kernels.fp8_support import Fp8Support

# Rows of tiles that neighbouring programs share: eight rows by as many columns of 128 x 128 tiles read 2 MiB of each
# operand for each 1024 of the contraction, which every L2 cache holds.
GROUP = 8
# A result of at most this many rows is one row of tiles: reading the weight is what takes the time.
MOST_FEW_ROWS = 64
# A contraction this many times as long as the smaller side of the result is that of a weight gradient: few tiles, each
# with much to sum, so smaller tiles are what keeps all multiprocessors busy.
LONG_CONTRACTION = 4
WIDE = 256


class Family(Enum):
    """Kinds of matrix units: what tiles depend on."""

    ADA = "ada"  # mma.sync: operands and sums in registers, 99 KiB of shared memory; also GeForce Blackwell
    HOPPER = "hopper"  # wgmma: operands in shared memory, sums in registers, 227 KiB
    BLACKWELL = "blackwell"  # tcgen05: operands in shared memory, sums in tensor memory, 227 KiB


class Form(Enum):
    """Classes of the shape of a product."""

    FEW_ROWS = "few rows"
    SQUARE = "square"
    LONG = "long contraction"


@dataclass(frozen=True)
class Tile:
    """``m`` x ``n`` of the result, summed ``k`` at a time by ``warps`` warps, ``stages`` pairs of pieces in flight.

    ``flatten``: the loops over tiles and along the contraction are one, so that a tile's first pieces are loaded while
    the one before is written.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    flatten: bool = False

    def __str__(self) -> str:
        words = f"{self.m}x{self.n}x{self.k}, {self.warps} warps, {self.stages} stages"
        return f"{words}, flattened" if self.flatten else words


def family_of(support: Fp8Support) -> Family:
    """The family of a GPU with FP8."""
    if not support.needs_two_layouts:
        return Family.BLACKWELL
    return Family.HOPPER if support.name.startswith("sm_9") else Family.ADA


def form_of(m: int, n: int, k: int) -> Form:
    """The class of a product [m,k] x [k,n]."""
    if m <= MOST_FEW_ROWS:
        return Form.FEW_ROWS
    return Form.LONG if k >= LONG_CONTRACTION * min(m, n) else Form.SQUARE


def tiles_for(product: Product, family: Family) -> tuple[Tile, ...]:
    """The candidates for ``product``, the best guess first."""
    form = form_of(product.m, product.n, product.k)
    if product.has_block_scales:
        return BLOCK_TILES[family][form]
    tiles = TILES[family][form]
    if product.fast_accumulation and family is Family.HOPPER and form is not Form.FEW_ROWS:
        tiles = FAST_TILES
    # A wide tile leaves no room for float32 results, nor registers for a scale for each of its columns.
    has_room = product.dtype.itemsize == 2 and not product.b.grid[1]
    return tuple(tile for tile in tiles if tile.n < WIDE or has_room)


def promote_every(family: Family, tile: Tile, *, fast_accumulation: bool) -> int | None:
    """After how many of the contraction Hopper's sums are moved to float32; None: the matrix unit is left to itself.

    Hopper's matrix unit sums FP8 products with about 14 bits. 128, as CUTLASS does, costs a quarter of the additions
    that each instruction's 32 would. (0 would mean none of this to Triton: it then turns codes into float16 and uses
    the matrix unit of those, which the tests would find.)
    """
    if family is not Family.HOPPER or fast_accumulation:
        return None
    return min(tile.k, SCALE_BLOCK)


TILES: dict[Family, dict[Form, tuple[Tile, ...]]] = {
    Family.ADA: {
        Form.FEW_ROWS: (Tile(16, 64, 256, 4, 4), Tile(32, 64, 256, 4, 3), Tile(64, 64, 128, 4, 4)),
        Form.SQUARE: (Tile(128, 128, 128, 8, 3), Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
        Form.LONG: (Tile(128, 128, 128, 8, 3), Tile(128, 64, 128, 4, 3), Tile(64, 64, 128, 4, 4)),
    },
    # 64 rows are the fewest of a wgmma. Sums that are promoted take registers twice: 128 x 256 of them would spill.
    Family.HOPPER: {
        Form.FEW_ROWS: (Tile(64, 32, 256, 4, 4), Tile(64, 64, 256, 4, 4), Tile(64, 128, 128, 4, 4)),
        Form.SQUARE: (Tile(128, 128, 128, 8, 4, flatten=True), Tile(128, 128, 128, 8, 4), Tile(64, 128, 128, 4, 4)),
        Form.LONG: (Tile(128, 128, 128, 8, 4, flatten=True), Tile(64, 128, 128, 4, 4), Tile(64, 64, 256, 4, 4)),
    },
    # Sums are in tensor memory, so tiles may be wide. A warp reads 32 rows of them: with 8 warps a thread holds half a
    # row. (16 warps would make Triton turn codes into float16.)
    Family.BLACKWELL: {
        Form.FEW_ROWS: (Tile(128, 32, 256, 4, 4), Tile(128, 64, 128, 8, 4), Tile(128, 128, 128, 8, 4)),
        Form.SQUARE: (
            Tile(128, 256, 128, 8, 3, flatten=True),
            Tile(128, 256, 128, 8, 3),
            Tile(128, 128, 128, 8, 4, flatten=True),
            Tile(128, 128, 128, 8, 4),
        ),
        Form.LONG: (Tile(128, 256, 128, 8, 3), Tile(128, 128, 128, 8, 4), Tile(128, 64, 128, 8, 4)),
    },
}

# Hopper without promotion: the width that the tensor cores need to be kept busy from shared memory.
FAST_TILES = (
    Tile(128, 256, 128, 8, 3, flatten=True),
    Tile(128, 256, 128, 8, 3),
    Tile(128, 128, 128, 8, 4, flatten=True),
)

# With block scales a piece is one block of 128, and sums and products of a block are in registers side by side.
# (On Blackwell 128 x 128, flattened, would spill with a scale for each column and float32 results.)
BLOCK_TILES: dict[Family, dict[Form, tuple[Tile, ...]]] = {
    Family.ADA: {
        Form.FEW_ROWS: (Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 128, 4, 3)),
        Form.SQUARE: (Tile(64, 128, 128, 8, 3), Tile(64, 64, 128, 4, 3), Tile(128, 64, 128, 8, 3)),
        Form.LONG: (Tile(64, 64, 128, 4, 3), Tile(64, 128, 128, 8, 3), Tile(32, 64, 128, 4, 3)),
    },
    Family.HOPPER: {
        Form.FEW_ROWS: (Tile(64, 32, 128, 4, 6), Tile(64, 64, 128, 4, 6), Tile(64, 128, 128, 4, 4)),
        Form.SQUARE: (Tile(128, 128, 128, 8, 4, flatten=True), Tile(64, 128, 128, 4, 4), Tile(128, 64, 128, 4, 4)),
        Form.LONG: (Tile(128, 128, 128, 8, 4, flatten=True), Tile(64, 64, 128, 4, 6), Tile(128, 64, 128, 8, 4)),
    },
    Family.BLACKWELL: {
        Form.FEW_ROWS: (Tile(128, 32, 128, 4, 6), Tile(128, 64, 128, 4, 5), Tile(128, 128, 128, 8, 4)),
        Form.SQUARE: (Tile(128, 128, 128, 8, 4), Tile(128, 64, 128, 8, 4, flatten=True), Tile(128, 64, 128, 8, 4)),
        Form.LONG: (Tile(128, 128, 128, 8, 4), Tile(128, 64, 128, 8, 4), Tile(128, 64, 128, 4, 5)),
    },
}
