"""What FP8 costs: the estimates reproduce public figures, shared quantizations are counted once, choices are exact."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from graphopt.cli import run
from graphopt.errors import DataError, UnsupportedError
from graphopt.fp8 import Blockwise, Delayed, Recipe, Rowwise, Tensorwise
from graphopt.planner.fp8_choice import LEAST_GAIN, Prices, choose_products
from graphopt.planner.fp8_costs import AnalyticRates, CostedProduct, Fp8Costs, SharedCost, Use, Value, layer_products
from graphopt.planner.fp8_devices import DEVICE_CLASSES, DeviceClass, class_of_device, device_class
from graphopt.planner.fp8_measure import device_timer, measure_table
from graphopt.planner.fp8_measured import (
    MeasuredProduct,
    MeasuredTable,
    read_table,
    table_file,
    write_table,
)
from graphopt.planner.fp8_setting import setting_of
from graphopt.planner.machine_rates import CACHE_VARIABLE

H100, H200 = device_class("H100"), device_class("H200")
# The layers of a 5B-class model that Transformer Engine's documents time: columns and contraction.
TE_LAYERS = ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384))
TE_TOKENS = 15872


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


def prices_of(products, device: DeviceClass, recipe: Recipe) -> Prices:
    costs = Fp8Costs(AnalyticRates(device, recipe), recipe)
    bf16, fp8 = (tuple(map(seconds, products)) for seconds in (costs.bf16_seconds, costs.fp8_seconds))
    return Prices(bf16, fp8, costs.shared(products))


def gain(products, device: DeviceClass, recipe: Recipe) -> float:
    """What all ``products`` save together."""
    prices = prices_of(products, device, recipe)
    return prices.total([False] * len(products)) - prices.total([True] * len(products))


def break_even(gain_at) -> int:
    """The least size at which ``gain_at`` is positive."""
    return next(size for size in range(16, 8192) if gain_at(size) > 0)


# ---- public figures --------------------------------------------------------------------------------------------------


def test_one_product_breaks_even_where_arithmetic_says():
    """MN / (M + N) = 620 on an H200 at its nominal rates, with both operands quantized in one pass (3 bytes each)."""

    def one(size):
        return gain(layer_products(size, size, 8192)[:1], H200.ideal(), Delayed())

    assert break_even(one) / 2 == pytest.approx(620, rel=0.02)
    assert gain(layer_products(64, 2**20, 8192)[:1], H200.ideal(), Delayed()) < 0


@pytest.mark.parametrize(("capability", "size"), [((10, 0), 620), ((9, 0), 825)], ids=["one layout", "two layouts"])
def test_a_layer_breaks_even_earlier_because_its_products_share_operands(capability, size):
    device = replace(H200.ideal(), capability=capability)
    assert break_even(lambda n: gain(layer_products(n, n, n), device, Delayed())) == pytest.approx(size, rel=0.02)


def test_products_that_wait_for_memory_break_even_later_and_real_ones_later_still():
    def cube(device):
        return break_even(lambda n: gain(layer_products(n, n, n), device, Delayed()))

    one_layout = replace(H200.ideal(), capability=(10, 0))
    assert 620 < cube(replace(one_layout, waits_for_memory=True)) < cube(replace(H200, capability=(10, 0)))
    assert 1000 < cube(H200) < 2048


@pytest.mark.parametrize(
    ("recipe", "milliseconds"), [(Tensorwise(), 20.3), (Delayed(), 19.0), (Blockwise(), 22.9)], ids=lambda value: value
)
def test_transformer_engines_times_on_an_h200_are_met_within_a_tenth(recipe, milliseconds):
    layers = [layer_products(TE_TOKENS, *sizes) for sizes in TE_LAYERS]
    prices = [prices_of(products, device_class("H200 NVL"), recipe) for products in layers]
    assert sum(sum(item.bf16) for item in prices) == pytest.approx(32.0e-3, rel=0.1)
    assert sum(item.total([True] * 3) for item in prices) == pytest.approx(milliseconds * 1e-3, rel=0.1)
    if not isinstance(recipe, Blockwise):
        assert sum(sum(item.fp8) for item in prices) == pytest.approx(16.8e-3, rel=0.1)


@pytest.mark.parametrize(("sizes", "speedup"), [((1024, 1024, 2048), 0.80), ((4096, 16384, 8192), 1.39)])
def test_torchaos_examples_fall_on_the_same_side(sizes, speedup):
    """tokens, columns, contraction and the measured speed-up of its README (float8, dynamic tensorwise, H100)."""
    prices = prices_of(layer_products(*sizes), H100, Tensorwise())
    ours = prices.total([False] * 3) / prices.total([True] * 3)
    assert (ours > 1) == (speedup > 1)
    assert speedup / 1.6 < ours < speedup * 1.6


# ---- what is shared --------------------------------------------------------------------------------------------------


def test_projections_of_one_input_quantize_it_once():
    x = Value("x", 8192 * 4096)
    weights = [Value(f"w{n}", 4096 * 1024, is_weight=True) for n in range(3)]
    products = [CostedProduct(8192, 1024, 4096, Use(x, False), Use(weight, False)) for weight in weights]
    found = prices_of(products, H100, Delayed())
    assert [cost.products for cost in found.shared if len(cost.products) == 3] == [(0, 1, 2)] * 2
    alone = sum(sum(prices_of([product], H100, Delayed()).quantize_seconds([True])) for product in products)
    together = found.quantize_seconds([True] * 3)
    assert sum(together) < 0.6 * alone and together[0] == pytest.approx(together[1])


def test_seconds_of_the_chosen_add_up_to_the_whole():
    prices = prices_of(layer_products(8192, 4096, 4096, weight_bytes=4), H100, Rowwise())
    quantize = prices.quantize_seconds([True] * 3)
    saved = sum(bf16 - fp8 - own for bf16, fp8, own in zip(prices.bf16, prices.fp8, quantize, strict=True))
    assert saved == pytest.approx(prices.total([False] * 3) - prices.total([True] * 3))


def test_weights_are_paid_once_for_all_micro_steps():
    def weight_cost(micro_steps):
        products = layer_products(16, 4096, 4096, micro_steps=micro_steps)
        return prices_of(products, H100, Delayed()).total([True] * 3)

    assert weight_cost(8) < weight_cost(1)
    assert gain(layer_products(2048, 4096, 4096, micro_steps=8), H100, Rowwise()) > gain(
        layer_products(2048, 4096, 4096), H100, Rowwise()
    )


def test_a_float32_weight_needs_no_cast_where_all_its_products_are_in_fp8():
    prices = prices_of(layer_products(8192, 4096, 4096, weight_bytes=4), H100, Delayed())
    (cast,) = [cost for cost in prices.shared if cost.is_bf16]
    assert cast.products == (0, 1)
    assert prices.total([True, False, True]) - prices.total([True, False, False]) < prices.bf16[2]
    both, one = prices.quantize_seconds([True, True, True]), prices.quantize_seconds([True, False, True])
    assert both[0] < one[0]


@pytest.mark.parametrize("recipe", [Tensorwise(), Delayed(), Rowwise(), Blockwise()], ids=lambda recipe: recipe.name)
def test_a_producer_that_quantizes_on_the_way_saves_a_reading(recipe):
    assert gain(layer_products(8192, 4096, 4096, is_fused=True), H100, recipe) > gain(
        layer_products(8192, 4096, 4096), H100, recipe
    )


def test_passes_over_operands_order_the_recipes():
    def quantizing(recipe):
        return sum(prices_of(layer_products(8192, 4096, 4096), H100, recipe).quantize_seconds([True] * 3))

    assert quantizing(Delayed()) < quantizing(Rowwise())
    assert quantizing(Delayed()) < quantizing(Tensorwise())


def test_padding_costs_work_and_copies():
    exact, (padded,) = layer_products(8192, 4096, 4096)[0], layer_products(8192, 4090, 4096)[:1]
    costs = Fp8Costs(AnalyticRates(H100, Tensorwise()), Tensorwise())
    assert costs.fp8_seconds(replace(padded, pad=(0, 6, 0))) > costs.fp8_seconds(exact)


# ---- choices ---------------------------------------------------------------------------------------------------------


def random_prices(draw: random.Random, num_products: int) -> Prices:
    shared = [
        SharedCost(draw.random(), tuple(draw.sample(range(num_products), draw.randint(1, 4))), draw.random() < 0.3)
        for _ in range(6)
    ]
    numbers = [tuple(draw.random() * scale for _ in range(num_products)) for scale in (3, 1.5)]
    return Prices(numbers[0], numbers[1], tuple(shared))


def test_the_choice_is_the_cheapest_of_all():
    draw = random.Random(0)
    for _ in range(50):
        prices, fixed = random_prices(draw, 6), {0: True, 1: False}

        def cost(chosen, prices=prices):
            kept = sum(bf16 for bf16, is_fp8 in zip(prices.bf16, chosen, strict=True) if not is_fp8)
            return prices.total(chosen) - LEAST_GAIN * kept

        every = [(True, False, *rest) for rest in itertools.product([False, True], repeat=4)]
        found = choose_products(prices, fixed)
        assert found[:2] == (True, False)
        assert cost(found) == pytest.approx(min(map(cost, every)), rel=1e-6)


def test_few_tokens_never_pay_and_the_three_products_may_differ():
    for recipe in (Tensorwise(), Rowwise(), Blockwise(), Delayed()):
        assert choose_products(prices_of(layer_products(16, 4096, 4096), H100, recipe), {}) == (False,) * 3
        assert choose_products(prices_of(layer_products(8192, 8192, 8192), H100, recipe), {}) == (True,) * 3
    partly = choose_products(prices_of(layer_products(8192, 1024, 8192), H100, Rowwise()), {})
    assert 0 < sum(partly) < 3


def test_nothing_to_choose_is_no_error():
    assert choose_products(Prices((), (), ()), {}) == ()


# ---- devices ---------------------------------------------------------------------------------------------------------


def test_devices_are_named_whatever_case_blanks_and_dashes():
    assert {device_class(name).name for name in ("h100", "H-100", " h100 ")} == {"H100"}
    assert device_class("4090") == device_class("rtx4090") == device_class("RTX 4090")
    by_driver = {"NVIDIA H100 80GB HBM3": "H100", "H100 SXM": "H100", "NVIDIA GeForce RTX 4090": "RTX 4090"}
    assert {name: device_class(name).name for name in by_driver} == by_driver
    for item in DEVICE_CLASSES:
        assert device_class(item.name) == item and item.support.has_fp8 == bool(item.fp8_flops)


def test_a_gpu_is_known_by_what_its_driver_calls_it():
    names = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA H200 NVL": "H200 NVL",
        "NVIDIA L4": "L4",
        "NVIDIA L40S": "L40S",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "NVIDIA A100-SXM4-80GB": "A100",
    }
    assert {name: class_of_device(name, (9, 0)).name for name in names} == names


@pytest.mark.parametrize(
    ("name", "capability", "like"),
    [
        ("NVIDIA L40", (8, 9), "L4"),
        ("NVIDIA H100 NVL", (9, 0), "H100"),
        ("NVIDIA GH200 480GB", (9, 0), "H100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), "H100"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), "RTX 4090"),
    ],
)
def test_a_gpu_whose_name_holds_a_known_one_is_another_device(name, capability, like):
    found = class_of_device(name, capability)
    assert (found.name, found.like) == (name, like)
    assert table_file(found.name) != table_file(like)


def test_an_unknown_gpu_gets_the_rates_of_its_generation_and_says_so():
    found = class_of_device("NVIDIA H20", (9, 0))
    assert found.name == "NVIDIA H20" and found.bf16_flops == H100.bf16_flops
    assert AnalyticRates(found, Rowwise()).name == "NVIDIA H20 (rates of H100 assumed)"
    assert not class_of_device("NVIDIA T4", (7, 5)).support.has_fp8


@pytest.mark.parametrize(
    ("name", "capability", "expected", "reason"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "H100 (estimated rates)", ""),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "sm_80", "no FP8 here: sm_80"),
    ],
)
def test_on_a_gpu_the_one_that_runs_decides(monkeypatch, name, capability, expected, reason):
    properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = setting_of(Tensorwise(), torch.device("cuda"))
    assert found.name == expected and found.reason.startswith(reason)
    # No target gives a device what it does not have.
    assert setting_of(Tensorwise(target="B200"), torch.device("cuda")).reason.startswith(reason)


# ---- measured --------------------------------------------------------------------------------------------------------


def measured() -> MeasuredTable:
    shapes = ((1024, 1024, 1024), (8192, 4096, 4096), (8192, 14336, 4096))
    products = (MeasuredProduct(*s, 4e-4, 1e-4, 2e-4, 3e-4) for s in shapes)
    return MeasuredTable("H100", True, 2e12, 5e-6, tuple(products))


def test_a_measured_table_replaces_the_estimates():
    recipe = Rowwise(target="h100")
    assert setting_of(recipe, torch.device("cpu")).name.startswith("H100 (estimated rates)")
    write_table(measured())
    found = setting_of(recipe, torch.device("cpu"))
    assert found.name == "H100 (measured), run as emulation on cpu" and found.rates is not None
    assert found.rates.fp8_seconds(8192, 4096, 4096) == pytest.approx(2e-4, rel=1e-3)
    assert found.rates.bf16_seconds(8192, 4096, 4096) == pytest.approx(4e-4, rel=1e-3)
    assert 2e-4 < found.rates.fp8_seconds(8192, 8192, 4096) < 8e-4
    assert found.rates.pass_seconds(2e6) == pytest.approx(6e-6)
    assert read_table("H100") == measured() and read_table("L4") is None


@pytest.mark.parametrize("content", ["", "{}", "[1]", json.dumps({"device": "H100", "products": []})])
def test_a_broken_table_is_an_error_that_says_what_to_do(content):
    write_table(measured())
    table_file("H100").write_text(content)
    with pytest.raises(DataError, match="run graphopt measure-fp8 again"):
        read_table("H100")


@pytest.mark.parametrize("wrong", [{"device": "H200"}, {"needs_two_layouts": "false"}], ids=str)
def test_a_table_of_another_device_or_with_another_type_is_refused(wrong):
    write_table(measured())
    table_file("H100").write_text(json.dumps({**asdict(measured()), **wrong}))
    with pytest.raises(DataError, match="expected device 'H100' and needs_two_layouts true or false"):
        read_table("H100")


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be written .* another folder in GRAPHOPT_CACHE"):
        write_table(measured())


def test_an_empty_batch_takes_a_call():
    rates = measured().rates(Rowwise())
    assert rates.bf16_seconds(0, 64, 64) == rates.fp8_seconds(0, 64, 64) == measured().call_seconds


def test_a_time_that_is_no_positive_number_is_refused():
    write_table(replace(measured(), call_seconds=0.0))
    with pytest.raises(DataError, match="a number is not positive"):
        read_table("H100")


def test_measuring_runs_the_operators_that_a_step_runs():
    """On a CPU the numbers mean nothing; that all three kinds of product are timed does not need a GPU."""
    cpu = torch.device("cpu")
    table = measure_table(
        cpu, "here", device_timer(cpu), needs_two_layouts=False, sizes=((32, 16, 48),), pass_elements=4096
    )
    (row,) = table.products
    assert min(row.bf16, row.tensorwise, row.rowwise, row.blockwise, table.pass_bytes, table.call_seconds) > 0
    assert write_table(table) == table_file("here") and read_table("here") == table


def test_the_command_says_that_there_is_nothing_to_measure_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["measure-fp8"]) == 2
    assert "nothing to measure on a CPU: FP8 is emulation" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match="target expects one of"):
        device_class("TPU")
