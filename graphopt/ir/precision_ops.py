"""What each operator is to mixed precision: which type its operands should have, and why. One answer per operator."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import fx

from graphopt.ir import ops
from graphopt.ir.linear_loss import LOSS

aten = torch.ops.aten


class Role(StrEnum):
    """What an operator gains or loses from a low type.

    MATRIX: a matrix product, convolution, attention or recurrent layer: gains, and sums in float32 inside.
    LINEAR_LOSS: a fused layer and loss. SENSITIVE: loses. LOSS: what a model is judged by. SUMS: a reduction that takes
    low operands, and the type of its sum as an argument. WHOLE: a kernel that computes in float32 inside whatever it is
    given. LOOKUP: rows of a table. ADDS: pointwise, and its backward needs no operand. POINTWISE: all other pointwise
    operators. MOVES: arranges or selects elements. CONVERTS: to another dtype. UNKNOWN: everything else.
    """

    MATRIX = "matrix product"
    LINEAR_LOSS = "fused linear loss"
    SENSITIVE = "sensitive"
    LOSS = "loss"
    SUMS = "sensitive: reduction"
    WHOLE = "float32 inside"
    LOOKUP = "lookup"
    ADDS = "addition"
    POINTWISE = "pointwise"
    MOVES = "arrangement"
    CONVERTS = "conversion"
    UNKNOWN = "unknown"


def _aten(names: str) -> frozenset[str]:
    """``aten::`` before each of the names, which blanks separate."""
    return frozenset(f"aten::{name}" for name in names.split())


_CONVOLUTIONS = _aten(
    "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc _convolution"
)
_OTHER_PRODUCTS = _aten("mv addmv bilinear einsum chain_matmul linalg_multi_dot _scaled_dot_product_attention_math")
_RECURRENT = _aten("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell mkldnn_rnn_layer")
_LSTM = frozenset({"aten::lstm", "aten::mkldnn_rnn_layer", "graphopt::lstm_layer"})
_NOT_ATEN = frozenset(
    {
        "graphopt::lstm_layer",
        "transformers::grouped_mm_fallback",  # what transformers' experts run where aten::_grouped_mm has no kernel
    }
)
_MATRIX = _CONVOLUTIONS | _OTHER_PRODUCTS | _RECURRENT | _NOT_ATEN

# Steep, or a difference of large numbers, or out of float16's range: the relative error of the operand grows.
_SENSITIVE = _aten(
    "exp exp2 expm1 log log2 log10 log1p pow square sqrt rsqrt reciprocal sin cos tan sinh cosh asin acos atan atanh "
    "acosh asinh erfinv softplus log_sigmoid logit lgamma digamma polygamma addcdiv addcmul"
)
_SMALL_POWERS = (2, 3)

# Reductions with an argument ``dtype``, the type of the sum and of the result.
_SUMS = _aten("sum nansum mean prod cumsum cumprod log_softmax linalg_vector_norm")

_RMS_NORMALISATIONS = _aten("rms_norm _fused_rms_norm")
_BATCH_NORMALISATIONS = _aten(
    "batch_norm native_batch_norm cudnn_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training"
)
_NORMALISATIONS = _RMS_NORMALISATIONS | _BATCH_NORMALISATIONS | _aten("layer_norm native_layer_norm group_norm")
_POOLING = _aten(
    "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool3d"
)
_SOFTMAX = _aten("softmax _softmax _safe_softmax")

_LOSSES = _aten(
    "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss kl_div ctc_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss soft_margin_loss cosine_embedding_loss "
    "hinge_embedding_loss margin_ranking_loss triplet_margin_loss multi_margin_loss logsumexp"
)

_ADDS = _aten("add sub rsub neg")

# Each element of the result is an element of an argument, or a constant; or says where one lies.
_MOVES = _aten(
    "cat stack clone contiguous copy repeat repeat_interleave roll flip rot90 tril triu index index_select gather take "
    "take_along_dim masked_select slice_scatter select_scatter diagonal_scatter as_strided_scatter scatter index_copy "
    "index_fill masked_scatter constant_pad_nd pad reflection_pad1d reflection_pad2d replication_pad1d "
    "replication_pad2d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool2d upsample_nearest1d "
    "upsample_nearest2d pixel_shuffle pixel_unshuffle im2col unfold where lift_fresh lift_fresh_copy detach_copy "
    "alias_copy dropout native_dropout alpha_dropout feature_dropout reshape flatten _unsafe_view _reshape_copy sort "
    "topk argmax argmin argsort amax amin max min unbind meshgrid tile bernoulli new_zeros new_ones new_full new_empty"
)

# Pointwise operators that do not take operands of different dtypes.
_ONE_DTYPE = _aten("prelu _prelu_kernel lerp")

_FILLS = _aten("masked_fill index_fill constant_pad_nd new_full fill")


def role(node: fx.Node) -> Role:
    """What ``node`` is to mixed precision."""
    op = ops.overload(node)
    name = qualified_name(node)
    if op is None:
        return Role.MOVES if ops.is_getitem(node) else Role.UNKNOWN
    if op is LOSS:
        return Role.LINEAR_LOSS
    if ops.is_matmul(node) or ops.is_attention(node) or name in _MATRIX:
        return Role.MATRIX
    if ops.is_conversion(node):
        return Role.CONVERTS
    if name in _SUMS and any(argument.name == "dtype" for argument in op._schema.arguments):
        return Role.SUMS
    if name in _NORMALISATIONS or name in _POOLING or name in _SOFTMAX:
        return Role.WHOLE
    if name == "aten::embedding":
        return Role.LOOKUP
    if name == "aten::index_put":
        return Role.UNKNOWN if ops.argument(node, 3, "accumulate", False) else Role.MOVES
    if name in _LOSSES:
        return Role.LOSS
    if name in _SENSITIVE or is_product_with_itself(node):
        return Role.SENSITIVE
    if name in _ADDS:
        return Role.ADDS
    if name in _MOVES or ops.is_view(node) or ops.keeps_order(node) or ops.is_factory(node):
        return Role.MOVES
    if ops.is_uninitialised(node):
        return Role.MOVES
    return Role.POINTWISE if ops.is_pointwise(node) else Role.UNKNOWN


def qualified_name(node: fx.Node) -> str:
    """The operator's name without its overload, such as ``aten::add``; empty for what is no operator."""
    op = ops.overload(node)
    return "" if op is None else op._schema.name


def is_small_power(node: fx.Node) -> bool:
    """Whether ``node`` is a square or a cube: as mild as a product of its operand."""
    name = qualified_name(node)
    if name == "aten::square" or is_product_with_itself(node):
        return True
    return name == "aten::pow" and len(node.args) > 1 and node.args[1] in _SMALL_POWERS


def is_product_with_itself(node: fx.Node) -> bool:
    """Whether ``node`` is a square that is written as a product."""
    return qualified_name(node) == "aten::mul" and node.args[0] is node.args[1]


def needs_one_dtype(node: fx.Node) -> bool:
    """Whether ``node``, though pointwise, does not take operands of different dtypes."""
    return qualified_name(node) in _ONE_DTYPE


def is_reduction(node: fx.Node) -> bool:
    """Whether ``node`` adds up or averages elements."""
    return qualified_name(node) in _SUMS and qualified_name(node) != "aten::log_softmax"


def takes_wide_weights(node: fx.Node, device: torch.device) -> bool:
    """Whether a WHOLE operator takes float32 weights beside operands of two bytes.

    Batch normalisation does everywhere, other normalisations on a CPU, RMS normalisation nowhere in one kernel.
    """
    name = qualified_name(node)
    return name in _BATCH_NORMALISATIONS or (device.type == "cpu" and name not in _RMS_NORMALISATIONS)


def lacks_kernel(node: fx.Node, compute: torch.dtype) -> bool:
    """Whether ``node`` cannot run in ``compute``: the CPU has no LSTM in float16 (torch 2.13)."""
    return compute is torch.float16 and qualified_name(node) in _LSTM and node.meta["val"][0].device.type == "cpu"


def mask_argument(node: fx.Node) -> fx.Node | None:
    """The mask that an attention call adds to its scores, if it is given one."""
    if not ops.is_attention(node):
        return None
    op = ops.overload(node)
    assert op is not None
    for position, schema_argument in enumerate(op._schema.arguments):
        if schema_argument.name in ("attn_mask", "attn_bias"):
            mask = ops.argument(node, position, schema_argument.name)
            return mask if isinstance(mask, fx.Node) else None
    return None


def numbers_in_data(node: fx.Node) -> tuple[float, ...]:
    """Numbers among the arguments that may become elements of the result, or are compared or added to them."""
    if not (ops.is_pointwise(node) or ops.is_factory(node) or qualified_name(node) in _FILLS):
        return ()
    fill = ops.fill_value(node)
    values = (fill,) if ops.is_factory(node) else (*node.args, *node.kwargs.values())
    return tuple(float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool))
