"""lower-precision: matrix work in two bytes, what is sensitive in float32, every cast once, and a reason for each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphopt
from graphopt.errors import UnsupportedError
from graphopt.ir.program import Stage
from graphopt.passes.lower_precision import LowerPrecision
from graphopt.pipeline.default import default_pipeline
from graphopt.pipeline.pipeline import Pipeline, Verify
from graphopt.precision import FULL, Precision
from tests.support.graphs import program_of, run_pass, targets

aten = torch.ops.aten

TABLE = "table: of positions, buffers and constants alone"
PRODUCT = aten.mm.default  # what a trace makes of ``@``


def lowered(function, *inputs, **options):
    return run_pass(LowerPrecision(**options), program_of(function, *inputs))


def calls(program, target):
    return [node for node in program.ops() if node.target is target]


def dtype_of(program, target):
    (node,) = calls(program, target)
    return node.meta["val"].dtype


def narrowing(program):
    return [
        node for node in calls(program, aten._to_copy.default) if node.meta["val"].dtype in (torch.bfloat16, torch.half)
    ]


@pytest.mark.parametrize(("compute", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_product_runs_in_the_compute_type_and_its_output_keeps_its_dtype(compute, dtype):
    program, record = lowered(lambda x, w: x @ w, torch.randn(4, 8), torch.randn(8, 3), compute=compute)
    assert record.changes and dtype_of(program, PRODUCT) is dtype
    assert [output.spec.dtype for output in program.signature.outputs] == [torch.float32]


def test_the_numbers_are_those_of_rounded_operands():
    x, w = torch.randn(4, 8), torch.randn(8, 3)
    program, _ = lowered(lambda x, w: x @ w, x, w)
    assert torch.equal(program.run([x, w])[0], (x.bfloat16() @ w.bfloat16()).float())


def test_one_cast_serves_all_users_and_all_views():
    def twice(x, w):
        return x @ w + x.sigmoid() @ w.t().t() + x.tanh() @ w.view(8, 8)

    program, _ = lowered(twice, torch.randn(4, 8), torch.randn(8, 8))
    weight = program.placeholders()[1]
    assert len([node for node in narrowing(program) if weight in node.all_input_nodes]) == 1


def test_a_part_of_a_large_tensor_is_cast_alone():
    program, _ = lowered(lambda x, w: x @ w[:8], torch.randn(4, 8), torch.randn(800, 8))
    assert max(node.meta["val"].numel() for node in narrowing(program)) == 64


@pytest.mark.parametrize("function", [torch.exp, torch.log, torch.rsqrt, torch.cos, nn.functional.softplus])
def test_a_steep_function_gets_float32(function):
    program, _ = lowered(lambda x, w: function((x @ w).abs() + 1), torch.rand(4, 8), torch.rand(8, 3))
    (node,) = [node for node in program.ops() if node.name.startswith(function.__name__)]
    assert node.meta["val"].dtype is torch.float32 and node.args[0].meta["val"].dtype is torch.float32


@pytest.mark.parametrize("square", [torch.square, lambda x: x**2, lambda x: x * x], ids=["square", "pow", "product"])
def test_a_square_beyond_the_range_of_float16_is_not_lost(square):
    def mean_square(x, w):
        return square(x @ w).mean()

    inputs = (torch.full((4, 8), 100.0), torch.ones(8, 3))
    exact = torch.tensor(800.0**2)
    for compute in ("fp16", "bf16"):
        program, _ = run_pass(LowerPrecision(compute), program_of(mean_square, *inputs), inputs=inputs)
        assert torch.allclose(program.run(inputs)[0], exact, rtol=1e-2), compute


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, lambda x: x.cumsum(0)])
def test_a_reduction_reads_two_bytes_and_sums_in_float32(reduce):
    program, _ = lowered(lambda x, w: reduce(x @ w), torch.rand(4, 8), torch.rand(8, 3))
    node = program.ops()[-1]
    assert node.args[0].meta["val"].dtype is torch.bfloat16 and node.meta["val"].dtype is torch.float32


def test_a_sum_of_many_does_not_stop_growing():
    x, w = torch.ones(4096, 1), torch.ones(1, 1)
    program, _ = lowered(lambda x, w: (x @ w).sum(), x, w)
    assert program.run([x, w])[0].item() == 4096.0


def test_an_unknown_operator_gets_what_the_model_has():
    program, _ = lowered(lambda x, w: torch.linalg.inv(x @ w), torch.eye(4), torch.eye(4))
    inverse = next(node for node in program.ops() if "inv" in node.name)
    assert inverse.args[0].meta["val"].dtype is torch.float32


def test_a_normalisation_stays_whole_with_low_input_and_float32_weights():
    def normalised(x, w, weight, bias):
        return nn.functional.layer_norm(x @ w, (3,), weight, bias) @ w.t()

    program, _ = lowered(normalised, torch.randn(4, 8), torch.randn(8, 3), torch.ones(3), torch.zeros(3))
    (norm,) = calls(program, aten.native_layer_norm.default)
    assert [value.dtype for value in norm.meta["val"]] == [torch.bfloat16, torch.float32, torch.float32]
    assert [argument.meta["val"].dtype for argument in norm.all_input_nodes] == [torch.bfloat16, *[torch.float32] * 2]


def test_a_normalisation_of_float32_alone_is_left():
    program, record = lowered(lambda x: nn.functional.layer_norm(x, (8,)), torch.randn(4, 8))
    assert record.changes == 0 and calls(program, aten.native_layer_norm.default)


def test_a_softmax_of_scores_is_low_and_one_behind_a_float_mask_is_not():
    mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
    program, _ = lowered(lambda q, k: (q @ k.t()).softmax(-1) @ k, torch.randn(4, 8), torch.randn(4, 8))
    assert dtype_of(program, aten._softmax.default) is torch.bfloat16
    masked, _ = lowered(lambda q, k, m: (q @ k.t() + m).softmax(-1) @ k, torch.randn(4, 8), torch.randn(4, 8), mask)
    assert dtype_of(masked, aten._softmax.default) is torch.float32


def test_a_fully_masked_row_stays_finite():
    lowest = torch.finfo(torch.float32).min

    def attend(q, k, open_):
        return (q @ k.t()).masked_fill(~open_, lowest).softmax(-1) @ k

    inputs = (torch.randn(4, 8), torch.randn(4, 8), torch.zeros(4, 4, dtype=torch.bool))
    for compute in ("bf16", "fp16"):
        program, _ = run_pass(LowerPrecision(compute), program_of(attend, *inputs), inputs=inputs)
        assert program.run(inputs)[0].isfinite().all()


def test_the_float_mask_of_an_attention_keeps_what_is_lowest_and_what_is_closed():
    mask = torch.tensor([[0.0, -torch.inf], [torch.finfo(torch.float32).min, -1.0]])

    def attend(q, mask):
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    program, _ = lowered(attend, torch.randn(1, 1, 2, 8), mask)
    cast = next(node for node in narrowing(program) if node.meta["val"].shape == (2, 2))
    program.set_outputs([cast], program.signature.outputs)
    (found,) = program.run([torch.randn(1, 1, 2, 8), mask])
    assert found.tolist() == [[0.0, -torch.inf], [torch.finfo(torch.bfloat16).min, -1.0]]


def test_tables_stay_in_float32_until_they_meet_activations():
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, 8, 2) / 8))

        def forward(self, x):
            positions = torch.arange(x.shape[0]).float()
            angles = torch.outer(positions, self.inv_freq)
            table = positions[:, None] @ self.inv_freq[None]
            turn = torch.cat([angles + 0 * table] * 2, -1)
            return self.layer(x) * turn.cos()

    program = Pipeline((LowerPrecision(),)).run(graphopt.capture(Rotary(), torch.randn(300, 8)))
    (cos,) = calls(program, aten.cos.default)
    assert {node.meta["val"].dtype for node in calls(program, aten.matmul.default)} == {torch.float32}
    assert cos.meta["val"].dtype is torch.float32
    assert {row.reason for row in program.precision.rows if row.operator == "aten.matmul.default"} == {TABLE}


def test_integers_booleans_doubles_and_complex_numbers_are_untouched():
    def mixed(x, w, ids, keep, scale, z):
        rows = w[ids]
        return (x @ w).masked_fill(keep[:, None], 0.0) * scale, rows, z * z, x.double() @ w.double()

    inputs = (
        torch.randn(4, 8),
        torch.randn(8, 8),
        torch.tensor([1, 5]),
        torch.tensor([True, False, True, True]),
        torch.tensor(2.0, dtype=torch.float64),
        torch.randn(3, dtype=torch.complex64),
    )
    program, _ = run_pass(LowerPrecision(), program_of(mixed, *inputs), inputs=inputs)
    assert all(torch.int64 is node.meta["val"].dtype for node in program.placeholders()[2:3])
    products = [node.meta["val"].dtype for node in calls(program, PRODUCT)]
    assert products == [torch.bfloat16, torch.float64]
    assert torch.equal(program.run(inputs)[3], inputs[0].double() @ inputs[1].double())


def test_sums_through_layers_are_low_in_bf16_and_float32_on_request():
    def block(ids, table, w):
        h = table[ids]
        h = nn.functional.embedding(ids, table)
        for _ in range(2):
            h = h + h.tanh() @ w
        return h @ w

    inputs = (torch.tensor([1, 2, 3]), torch.randn(5, 8), torch.randn(8, 8))
    low = Pipeline((LowerPrecision("bf16"),)).run(_with_parameters(block, *inputs))
    wide = Pipeline((LowerPrecision("bf16", residual="fp32"),)).run(_with_parameters(block, *inputs))
    half = Pipeline((LowerPrecision("fp16"),)).run(_with_parameters(block, *inputs))
    assert {node.meta["val"].dtype for node in calls(low, aten.add.Tensor)} == {torch.bfloat16}
    assert {node.meta["val"].dtype for node in calls(wide, aten.add.Tensor)} == {torch.float32}
    assert {node.meta["val"].dtype for node in calls(half, aten.add.Tensor)} == {torch.float32}
    # What tanh keeps for backward is low in each.
    assert {node.meta["val"].dtype for node in calls(wide, aten.tanh.default)} == {torch.bfloat16}


def _with_parameters(function, ids, table, w):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.w = nn.Parameter(table.clone()), nn.Parameter(w.clone())

        def forward(self, ids):
            return function(ids, self.table, self.w)

    return graphopt.capture(Model(), ids)


def test_named_modules_stay_in_float32_and_the_report_says_by_which_pattern():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3))
    program = Pipeline((LowerPrecision(keep_fp32="1|x.*"),)).run(graphopt.capture(model, torch.randn(4, 8)))
    dtypes = [node.meta["val"].dtype for node in calls(program, aten.linear.default)]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert [refusal.reason for refusal in program.history[-1].refusals] == ["kept by keep_fp32 pattern '1'"]
    assert "kept by keep_fp32 pattern '1'" in program.precision.text()


def test_every_operator_has_a_dtype_and_a_reason():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3), nn.Softmax(-1))
    program = Pipeline((LowerPrecision(),)).run(graphopt.capture(model, torch.randn(4, 8)))
    assert [(row.module, row.dtype) for row in program.precision.rows] == [(str(i), "bf16") for i in range(5)]
    assert program.precision.rows[0].reason == "matrix product" and program.precision.rows[0].weights == (
        "0.weight",
        "0.bias",
    )
    assert program.precision.within("1")[0].reason == "kernel computes in float32 inside, follows its input"


def test_a_narrowing_cast_survives_every_later_pass():
    def rounded(x):
        return x.to(torch.bfloat16).float() - x

    x = torch.randn(64)
    program = Pipeline.parse("lower-precision,drop-dead,fold-identities,simplify-algebra,dedupe,drop-dead").run(
        program_of(rounded, x)
    )
    assert torch.equal(program.run([x])[0], x.bfloat16().float() - x) and program.run([x])[0].abs().max() > 0


def test_a_model_in_two_bytes_gets_float32_where_it_is_sensitive():
    model = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 3)).bfloat16()
    program = Pipeline((LowerPrecision(),)).run(graphopt.capture(model, torch.randn(4, 8, dtype=torch.bfloat16)))
    (softplus,) = calls(program, aten.softplus.default)
    assert softplus.meta["val"].dtype is torch.float32
    assert [output.spec.dtype for output in program.signature.outputs] == [torch.bfloat16]


def test_running_statistics_stay_in_float32():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    program = Pipeline((LowerPrecision(),)).run(graphopt.capture(model, torch.randn(2, 3, 8, 8)))
    (norm,) = calls(program, aten._native_batch_norm_legit_functional.default)
    assert [value.dtype for value in norm.meta["val"]] == [torch.bfloat16, *[torch.float32] * 4]


def test_the_attention_and_the_fused_loss_are_found_before_casts_hide_them():
    from tests.support.models import tiny_model

    tiny = tiny_model("llama")
    program = graphopt.capture(tiny.model, tiny.batch, outputs=["loss"])
    passes = ",".join(map(str, default_pipeline(Stage.FORWARD, precision=Precision("bf16"))))
    program = Pipeline.parse(passes.replace("fuse-linear-loss", "fuse-linear-loss{min_logits_bytes=0}")).run(program)
    (loss,) = calls(program, torch.ops.graphopt.linear_cross_entropy.default)
    assert [argument.meta["val"].dtype for argument in loss.args[:2]] == [torch.bfloat16, torch.float32]
    assert all(node.args[3] is None for node in calls(program, aten.scaled_dot_product_attention.default))


def test_it_runs_only_when_asked_for_and_then_in_the_order_of_the_list():
    assert "lower-precision" not in str(default_pipeline(Stage.FORWARD))
    assert default_pipeline(Stage.FORWARD, precision=FULL) == default_pipeline(Stage.FORWARD)
    text = str(default_pipeline(Stage.FORWARD, precision=Precision("fp16", keep_fp32=("a", "b.*"))))
    assert text.endswith("drop-dead,lower-precision{compute=fp16,keep_fp32=a|b.*},drop-dead")
    assert str(Pipeline.parse(text)) == text


def test_options_are_checked():
    with pytest.raises(UnsupportedError, match="compute expects one of"):
        Pipeline.parse("lower-precision{compute=fp8}")
    with pytest.raises(UnsupportedError, match="residual expects one of"):
        LowerPrecision(residual="bf16")


def test_it_saves_half_of_what_backward_keeps():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    saved = []
    for precision in ("fp32", "bf16"):
        step = graphopt.compile(
            model,
            outputs=["loss"],
            loss=lambda out, batch: out.sum(),
            optimizer=graphopt.optim.SGD(lr=0.0),
            precision=precision,
            backend="aten",
        )
        step(torch.randn(512, 64))
        saved.append(step.report().records[-1].saved_bytes_after)
    # Activations halve; the float32 parameters are saved by no one, their casts of 2 * 4 * 64 * 64 bytes are.
    assert saved[1] <= saved[0] / 2 + 2 * 4 * 64 * 64 + 512 * 64 * 4


def test_a_lowered_program_passes_every_level_of_proof():
    program = program_of(lambda x, w: (x @ w).exp().sum(), torch.rand(4, 8), torch.rand(8, 3))
    for level in Verify:
        assert targets(Pipeline((LowerPrecision(),)).run(program, verify=level)).count("mm") == 1
