"""The operators each fact in ``ops.py`` is about, as literal sets. Ask ``ops.py``; nothing else reads these."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

import graphopt.operators.block_update  # noqa: F401  registers operators that are named below
from graphopt.ir import transfer_ops
from graphopt.operators import fp8, paged_update
from graphopt.operators.embedding_rows import ADD_EMBEDDING_ROWS

aten = torch.ops.aten

SCALAR_OPS: frozenset[Callable[..., Any]] = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg, max, min}
)
"""Arithmetic on Python numbers (learning rate, bias corrections); exact as Python computes it."""

# These draw from the generator only for some arguments; the position of the deciding argument and its idle value.
RANDOM_ONLY_IF = {
    aten.scaled_dot_product_attention.default: (4, "dropout_p", 0.0),
    aten._scaled_dot_product_flash_attention.default: (3, "dropout_p", 0.0),
    aten._scaled_dot_product_efficient_attention.default: (5, "dropout_p", 0.0),
    aten._scaled_dot_product_cudnn_attention.default: (5, "dropout_p", 0.0),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (3, "dropout_p", 0.0),
    aten._scaled_dot_product_attention_math.default: (4, "dropout_p", 0.0),
    aten.native_dropout.default: (2, "train", False),
    aten.dropout.default: (2, "train", False),
    aten.lstm.input: (5, "dropout", 0.0),
    aten.gru.input: (5, "dropout", 0.0),
}

# Tagged by torch as drawing random numbers, though they only use numbers drawn before.
NEVER_RANDOM = frozenset(
    {
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
    }
)

# ``empty_like(x).bernoulli_(p)``, with the probability as a number.
DRAWS_BY_SHAPE = frozenset({aten.bernoulli.p})

# They check or announce something and return nothing that a graph could depend on.
EFFECTS = frozenset(
    {
        aten._assert_async.default,
        aten._assert_async.msg,
        aten._assert_scalar.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
        aten._print.default,
    }
)

# With ``training`` (argument 5) they write the running mean and variance (arguments 3 and 4); their schemas say they
# write nothing (torch 2.13).
WRITES_RUNNING_STATISTICS = frozenset(
    {
        aten.native_batch_norm.default,
        aten.cudnn_batch_norm.default,
        aten.miopen_batch_norm.default,
        aten.batch_norm.default,
    }
)

# The result is uninitialised memory: two calls are never the same value.
UNINITIALISED = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.empty_permuted.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)

# They start a copy to or from far memory, or wait for one: two calls are never the same, and none may run twice.
TRANSFERS = frozenset(
    {transfer_ops.OFFLOAD, transfer_ops.OFFLOADED, transfer_ops.PREFETCH, transfer_ops.ARRIVED},
)

# They start a copy into the buffer that they return: two calls are never the same, and none may be tried.
PAGE_INS = frozenset({paged_update.PAGE_IN})

# The state of a parameter is updated where it lies, range by range.
PAGED_UPDATES = frozenset({paged_update.PAGED_UPDATE, paged_update.PAGED_UPDATE_})

MATMULS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.matmul.default,
        aten.linear.default,
        aten._grouped_mm.default,
    }
)

# A matrix to FP8 codes and scales, or back.
FP8_CASTS = frozenset(
    {
        fp8.QUANTIZE,
        fp8.QUANTIZE_TRANSPOSED,
        fp8.QUANTIZE_BOTH,
        fp8.QUANTIZE_DELAYED,
        fp8.QUANTIZE_DELAYED_BOTH,
        fp8.DEQUANTIZE,
    }
)

FP8_MATMULS = frozenset({fp8.MATMUL})

ATTENTION = frozenset(
    {
        aten.scaled_dot_product_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)

ATTENTION_BACKWARD = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    }
)

# Their arguments called ``input`` or ``x`` are what was normalised.
NORMALISATION_BACKWARD = frozenset(
    {
        aten.native_layer_norm_backward.default,
        aten.native_group_norm_backward.default,
        aten._fused_rms_norm_backward.default,
    }
)

SOFTMAX = frozenset(
    {
        aten._softmax.default,
        aten._safe_softmax.default,
        aten._log_softmax.default,
        aten.softmax.int,
        aten.log_softmax.int,
    }
)

# Pointwise backward operators that compute with ``1 - result``, whose digits are gone near 1.
NEAR_ONE = frozenset({aten.tanh_backward.default, aten.sigmoid_backward.default, aten.logit_backward.default})

# Pointwise operators that jump where an operand passes some number: next to it, no error of the operand is small.
JUMPS = frozenset(
    {
        aten.threshold_backward.default,
        aten.sign.default,
        aten.sgn.default,
        aten.heaviside.default,
        aten.copysign.Tensor,
        aten.angle.default,
        aten.atan2.default,
        aten.floor.default,
        aten.ceil.default,
        aten.round.default,
        aten.round.decimals,
        aten.trunc.default,
        aten.frac.default,
        aten.fmod.Scalar,
        aten.fmod.Tensor,
        aten.remainder.Scalar,
        aten.remainder.Scalar_Tensor,
        aten.remainder.Tensor,
        aten.div.Scalar_mode,
        aten.div.Tensor_mode,
        aten.threshold.default,
        aten.hardshrink.default,
    }
)

# The first result has the shape of the first argument; the others are statistics, one number for each row.
ROW_NORMALISATIONS = frozenset({aten.native_layer_norm.default, aten._fused_rms_norm.default})

FACTORIES = frozenset(
    {
        aten.zeros.default,
        aten.zeros_like.default,
        aten.ones.default,
        aten.ones_like.default,
        aten.full.default,
        aten.full_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.scalar_tensor.default,
        aten.eye.default,
        aten.eye.m,
    }
)


# Pointwise by their definition, but torch (2.11: the last two; to 2.14: the others) does not tag them.
UNTAGGED_POINTWISE = frozenset(
    {
        aten.__and__.Tensor,
        aten.__and__.Scalar,
        aten.__or__.Tensor,
        aten.__or__.Scalar,
        aten.where.ScalarSelf,
        aten.where.ScalarOther,
        aten.where.Scalar,
        aten.masked_fill.Tensor,
        aten.leaky_relu.default,
        aten._conj_physical.default,
    }
)

# Each element is 0 or 1, drawn by itself.
COIN_TOSSES = frozenset({aten.bernoulli.p, aten.bernoulli.default})

# Not pointwise, but their in-place form changes elements of the first argument only by what other arguments say.
SCATTERS = frozenset({aten.scatter_add.default, ADD_EMBEDDING_ROWS})

# They read this argument element by element and widen each to float32, from bfloat16, float16 or float32.
WIDENS_ARGUMENT = {
    torch.ops.graphopt.block_adam.default: (1, "gradient"),
    torch.ops.graphopt.block_lion.default: (1, "gradient"),
}

# The elements of the first argument in the same row-major order; only the shape (and the strides) may differ.
ORDER_KEEPING = frozenset(
    {
        aten.alias.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.flatten.using_ints,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.clone.default,
        aten.contiguous.default,
    }
)


# The elements of the first argument, unchanged unless the dtype changes; memory, layout or device may be others.
COPIES = frozenset(
    {
        aten._to_copy.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.detach.default,
        aten.detach_copy.default,
        aten.alias_copy.default,
    }
)

# The whole new shape is an argument, so what shape the input had does not matter.
RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})

ARITHMETIC = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
    aten.div.Tensor_mode: "div",
    aten.div.Scalar_mode: "div",
    aten.pow.Tensor_Scalar: "pow",
}
INVOLUTIONS = frozenset({aten.neg.default, aten.logical_not.default, aten.bitwise_not.default})

# Factories that give one number everywhere: the number, or the position of the argument that holds it.
FILLS_WITH = {
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}
FILLS_WITH_ARGUMENT = {
    aten.scalar_tensor.default: 0,
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
}
