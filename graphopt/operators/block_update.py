import torch
from torch import Tensor


def _deq(c, s, block, signed):
    n = c.numel()
    f = c.reshape(-1).float()
    sc = s.repeat_interleave(block)[:n]
    r = f / (127 if signed else 255)
    return (r.abs() * r if signed else r * r * r * r) * sc


def _q(x, block, signed):
    n = x.numel()
    nb = -(-n // block)
    pad = torch.nn.functional.pad(x, (0, nb * block - n)).view(nb, block)
    s = pad.abs().amax(1)
    r = torch.where(s[:, None] > 0, pad / s[:, None], 0.0)
    if signed:
        c = (r.abs().sqrt() * r.sign() * 127).round().to(torch.int8)
    else:
        c = (r.sqrt().sqrt() * 255).round()
        c = torch.where((pad > 0), c.clamp(min=1), c).to(torch.uint8)
    return c.view(-1)[:n], s


def _adam(p, g, m, ms, v, vs, factor, lr, wd, b1, b2, eps, step, block, map, dec, ss, sw, seed, offset):
    x = p.reshape(-1).float()
    gg = g.reshape(-1).float()
    if factor is not None:
        gg = gg * factor
    if dec:
        x = x * (1 - lr * wd)
    else:
        gg = gg + wd * x
    mm = _deq(m, ms, block, True)
    vv = _deq(v, vs, block, False)
    mm = mm + (1 - b1) * (gg - mm)
    vv = b2 * vv + (1 - b2) * gg * gg
    x = x - lr / (1 - b1**step) * mm / (vv.sqrt() / (1 - b2**step) ** 0.5 + eps)
    cm, sm = _q(mm, block, True)
    cv, sv = _q(vv, block, False)
    return x.to(p.dtype).view(p.shape), cm.view(p.shape), sm, cv.view(p.shape), sv


@torch.library.custom_op("graphopt::block_adam", mutates_args=())
def block_adam(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    factor: Tensor | None,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: float,
    block: int,
    map: str,
    decoupled: bool,
    stochastic_state: bool,
    stochastic_weight: bool,
    seed: int,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _adam(
        parameter,
        gradient,
        exp_avg,
        exp_avg_scale,
        exp_avg_sq,
        exp_avg_sq_scale,
        factor,
        lr,
        weight_decay,
        beta1,
        beta2,
        eps,
        step,
        block,
        map,
        decoupled,
        stochastic_state,
        stochastic_weight,
        seed,
        offset,
    )


@block_adam.register_fake
def _(p, g, m, ms, v, vs, *a):
    return tuple(torch.empty_like(t) for t in (p, m, ms, v, vs))


@torch.library.custom_op(
    "graphopt::block_adam_", mutates_args=("parameter", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
)
def block_adam_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    factor: Tensor | None,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: float,
    block: int,
    map: str,
    decoupled: bool,
    stochastic_state: bool,
    stochastic_weight: bool,
    seed: int,
    offset: int,
) -> None:
    for t, n in zip(
        (parameter, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale),
        _adam(
            parameter,
            gradient,
            exp_avg,
            exp_avg_scale,
            exp_avg_sq,
            exp_avg_sq_scale,
            factor,
            lr,
            weight_decay,
            beta1,
            beta2,
            eps,
            step,
            block,
            map,
            decoupled,
            stochastic_state,
            stochastic_weight,
            seed,
            offset,
        ),
    ):
        t.copy_(n)


@block_adam_.register_fake
def _(*a):
    return None


BLOCK_ADAM = torch.ops.graphopt.block_adam.default
BLOCK_LION = None
