"""Decisions of training are found again by module, parameters, order and size."""

from __future__ import annotations

from graphopt.ir.fp8_trained import NOTHING_TRAINED, Decision, ForwardProduct

YES, NO = Decision(True, "pays"), Decision(False, "too small")


def product(module: str = "up", rows: int = 64) -> ForwardProduct:
    return ForwardProduct(module, (f"{module}.weight",), (rows, 32, 32))


def test_the_same_size_goes_before_what_came_last():
    trained = NOTHING_TRAINED.with_decisions([(product(rows=64), YES)]).with_decisions([(product(rows=16), NO)])
    found = [trained.about([product(rows=rows)])[0] for rows in (64, 16, 32)]
    assert found == [YES, NO, NO]


def test_a_module_that_runs_twice_has_two_decisions():
    trained = NOTHING_TRAINED.with_decisions([(product(), YES), (product("down"), YES), (product(), NO)])
    assert trained.about([product(), product(), product(), product("down")]) == (YES, NO, None, YES)


def test_an_empty_batch_says_nothing_of_others():
    trained = NOTHING_TRAINED.with_decisions([(product(), YES)]).with_decisions([(product(rows=0), NO)])
    assert [trained.about([product(rows=rows)]) for rows in (0, 16)] == [(YES,), (YES,)]
    assert NOTHING_TRAINED.about([product()]) == (None,)
