"""The arithmetic of linear + cross-entropy in pieces: logits of some rows or some classes at a time, never all.

N rows (tokens), D features, V classes; R rows or C classes of one piece. With logits
``z = softcap * tanh(logit_scale * (h W^T + b) / softcap)``, row weight ``c = class_weight[target]`` (0 where
ignored) and ``lse = logsumexp(z)``, a row's loss is::

    (1 - s) * c * (lse - z[target])  +  s / V * sum_j class_weight[j] * (lse - z[j])  +  z_loss * lse^2

and its gradient ``dz[j] = pull * softmax(z)[j] - push * [j == target] - spread * class_weight[j]``. Sums and logits
are in float32, or in float64 for float64 inputs, whatever the dtype of ``h`` and ``W``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

NONE, MEAN, SUM = 0, 1, 2  # ATen's numbers for a reduction

_CAST_BLOCK_ELEMENTS = 2**20
"""Elements of the weight that are converted to float32 at a time: 4 MiB, which a second-level cache holds in parts."""


@dataclass(frozen=True)
class Head:
    """hidden: [N,D]; weight: [V,D], any dense layout; bias: [V] or None. Their dtypes may differ."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """What logits and sums are computed in."""
        return torch.promote_types(torch.promote_types(self.hidden.dtype, self.weight.dtype), torch.float32)


@dataclass(frozen=True)
class Labels:
    """target: i64[N]; class_weight: [V] or None."""

    target: Tensor
    class_weight: Tensor | None


@dataclass(frozen=True)
class LossOptions:
    """``softcap`` 0.0: no capping. ``z_loss`` times the mean (reduction mean: over all N rows) or sum of ``lse^2``."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    logit_scale: float
    reduction: int


@dataclass(frozen=True)
class RowFacts:
    """What labels alone say of rows. valid: b1[R]; target: i64[R], 0 where ignored; weight: [R], 0 where ignored.

    total: [], the sum of all N weights; num_rows: N, of which these may be a part.
    """

    valid: Tensor
    target: Tensor
    weight: Tensor
    total: Tensor
    num_rows: int

    def of_rows(self, start: int, end: int) -> RowFacts:
        """The facts of rows ``start`` to ``end``."""
        rows = slice(start, end)
        return RowFacts(self.valid[rows], self.target[rows], self.weight[rows], self.total, self.num_rows)


@dataclass(frozen=True)
class RowGradient:
    """Coefficients of ``dz``: each [R,1]. ``spread`` is None without label smoothing."""

    pull: Tensor
    push: Tensor
    spread: Tensor | None


def row_facts(labels: Labels, options: LossOptions, dtype: torch.dtype) -> RowFacts:
    """The RowFacts of all rows, in ``dtype``."""
    valid = labels.target != options.ignore_index
    target = labels.target.masked_fill(~valid, 0)
    if labels.class_weight is None:
        weight = valid.to(dtype)
    else:
        weight = labels.class_weight.index_select(0, target).to(dtype).masked_fill_(~valid, 0.0)
    return RowFacts(valid, target, weight, weight.sum(), target.shape[0])


def pieces(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and end of consecutive pieces of ``size``, the last one shorter."""
    return ((start, min(start + size, length)) for start in range(0, length, max(size, 1)))


def cast_block(features: int) -> int:
    """How many classes' weights are converted at a time."""
    return max(1, _CAST_BLOCK_ELEMENTS // max(features, 1))


def project(out: Tensor, hidden: Tensor, head: Head) -> None:
    """Write ``hidden W^T + b`` into ``out``; a weight of lower precision is converted block by block."""
    hidden = hidden.to(out.dtype)
    if head.weight.dtype == out.dtype:
        torch.mm(hidden, head.weight.t(), out=out)
    else:
        for start, end in pieces(head.weight.shape[0], cast_block(head.weight.shape[1])):
            torch.mm(hidden, head.weight[start:end].to(out.dtype).t(), out=out[:, start:end])
    if head.bias is not None:
        out.add_(head.bias)


def shape_logits(logits: Tensor, options: LossOptions) -> None:
    """Scale and cap logits in place."""
    if options.softcap:
        logits.mul_(options.logit_scale / options.softcap).tanh_().mul_(options.softcap)
    elif options.logit_scale != 1.0:
        logits.mul_(options.logit_scale)


def unshape_gradient(gradient: Tensor, logits: Tensor | None, options: LossOptions) -> None:
    """Turn ``dz`` into the gradient before ``shape_logits``, in place; ``logits`` (spoiled) are needed for capping."""
    if logits is not None:
        slope = logits.div_(options.softcap).square_().neg_().add_(1.0)
        gradient.mul_(slope)
    if options.logit_scale != 1.0:
        gradient.mul_(options.logit_scale)


def class_mass(labels: Labels, num_classes: int, dtype: torch.dtype) -> Tensor | float:
    """The sum of all class weights."""
    return float(num_classes) if labels.class_weight is None else labels.class_weight.to(dtype).sum()


def weighted_logits(logits: Tensor, labels: Labels, options: LossOptions) -> Tensor | None:
    """``sum_j class_weight[j] * z[j]``: [R]; None without label smoothing."""
    if not options.label_smoothing:
        return None
    if labels.class_weight is None:
        return logits.sum(1)
    return logits.mv(labels.class_weight.to(logits.dtype))


def row_losses(
    lse: Tensor,
    picked: Tensor,
    weighted: Tensor | None,
    facts: RowFacts,
    labels: Labels,
    num_classes: int,
    options: LossOptions,
) -> Tensor:
    """Losses of the rows without z_loss: [R]. ``picked``: the target's logit; ``weighted``: see weighted_logits."""
    losses = (lse - picked).mul_(facts.weight)
    if weighted is not None:
        smooth = lse * class_mass(labels, num_classes, lse.dtype) - weighted
        losses.mul_(1 - options.label_smoothing).add_(smooth, alpha=options.label_smoothing / num_classes)
    return losses.masked_fill_(~facts.valid, 0.0)


def reduced(losses: Tensor, lse: Tensor, facts: RowFacts, options: LossOptions) -> Tensor:
    """The loss: [N] or []; a mean over no valid label is NaN, as torch's."""
    if options.reduction == NONE:
        return losses.add(lse.square(), alpha=options.z_loss) if options.z_loss else losses
    loss = losses.sum()
    if options.reduction == MEAN:
        loss = loss / facts.total
    if options.z_loss:
        squares = lse.square()
        loss = loss.add(squares.mean() if options.reduction == MEAN else squares.sum(), alpha=options.z_loss)
    return loss


def row_gradient(
    grad_loss: Tensor, lse: Tensor, facts: RowFacts, labels: Labels, num_classes: int, options: LossOptions
) -> RowGradient:
    """The RowGradient for a gradient of the loss: [] or [R].

    Ignored rows get 0 even where the mean divides by no label at all, as torch's do.
    """
    grad = grad_loss.to(lse.dtype)
    scaled = grad / facts.total if options.reduction == MEAN else grad
    scaled = torch.where(facts.valid, scaled, 0.0)
    pull = push = scaled * facts.weight
    spread = None
    if options.label_smoothing:
        push = push * (1 - options.label_smoothing)
        spread = scaled * (options.label_smoothing / num_classes)
        pull = push + spread * class_mass(labels, num_classes, lse.dtype)
        spread = spread.unsqueeze(1)
    if options.z_loss:
        share = 1 / facts.num_rows if options.reduction == MEAN else 1.0
        pull = pull + grad * lse * (2 * options.z_loss * share)
    return RowGradient(pull.unsqueeze(1), push.unsqueeze(1), spread)


def spread_smoothing(gradient: Tensor, spread: Tensor | None, class_weight: Tensor | None) -> None:
    """Take label smoothing's share off ``dz``, in place."""
    if spread is None:
        return
    if class_weight is None:
        gradient.sub_(spread)
    else:
        gradient.addr_(spread.squeeze(1), class_weight.to(gradient.dtype), alpha=-1)
