"""The comparison with torchao's filters: the page prints what the costs say, and each difference has a reason."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.fp8_eligibility import (
    EXPLAINED_TOKENS,
    FILTERS,
    PAGE,
    TOKENS,
    WIDTHS,
    agreement,
    comparisons,
    generated_section,
    main,
    rowwise_filter,
    tensorwise_filter,
    whole_agreement,
)

app = typer.Typer(add_completion=False)
app.command()(main)


def test_the_filters_are_torchaos():
    assert not rowwise_filter(2048, 16384) and not rowwise_filter(16384, 1024) and not rowwise_filter(4096, 2048)
    assert rowwise_filter(4096, 4096) and rowwise_filter(8192, 2048)
    assert not tensorwise_filter(1024, 4096) and tensorwise_filter(1024, 8192) and tensorwise_filter(2048, 512)


def test_the_page_is_up_to_date():
    assert CliRunner().invoke(app, ["--check"]).exit_code == 0


def test_the_shares_that_are_printed_are_those_of_the_costs():
    row = r"^\| (\d+) \| (\d+ of \d+) \| (\d+ of \d+) \|$"
    printed = re.findall(row, PAGE.read_text(), flags=re.MULTILINE)
    counted = []
    for recipe, takes in FILTERS:
        for tokens in TOKENS:
            found = tuple(comparisons(recipe, takes, tokens))
            counted.append((str(tokens), whole_agreement(found), agreement(found)))
    assert printed == counted


@pytest.mark.parametrize(("recipe", "takes"), FILTERS, ids=[recipe.name for recipe, _ in FILTERS])
def test_every_difference_has_a_reason_that_its_numbers_bear_out(recipe, takes):
    section = generated_section()
    for tokens in TOKENS:
        for item in comparisons(recipe, takes, tokens):
            assert bool(item.reason) == (not item.agrees)
            if item.agrees:
                continue
            if not any(item.ours):
                assert item.theirs and item.quantize_seconds > item.products_save - 0.05 * item.bf16_seconds
            if all(item.ours):
                assert not item.theirs and item.products_save > item.quantize_seconds
            if tokens == EXPLAINED_TOKENS:
                assert item.reason in section


@pytest.mark.parametrize(("recipe", "takes"), FILTERS, ids=[recipe.name for recipe, _ in FILTERS])
def test_we_agree_on_the_largest_and_the_smallest_layers_and_on_most(recipe, takes):
    found = tuple(comparisons(recipe, takes, EXPLAINED_TOKENS))
    by_size = {(item.columns, item.contraction): item for item in found}
    assert by_size[WIDTHS[0], WIDTHS[0]].cell == "---" and by_size[WIDTHS[-1], WIDTHS[-1]].cell == "FIW"
    assert sum(item.pays_whole == item.theirs for item in found) > 0.6 * len(found)
    # Ours looks at tokens.
    assert not any(any(item.ours) for item in comparisons(recipe, takes, 16))
