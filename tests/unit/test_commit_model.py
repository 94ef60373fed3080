"""The product refines the exhaustive model of the commit protocol, and is deaf where it is."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.commit_model import (
    AP,
    ARGUMENTS,
    GEN,
    HISTORIES,
    PH,
    PR,
    RD,
    REFERENCE,
    ST,
    Product,
    differences,
    reference,
)
from tests.unit.commit_steps import follow
from trainmover.runtime import commit
from trainmover.runtime.commit import Position, ProtocolError

SCENARIOS = [
    name for name, args in ARGUMENTS.items() if "planned" not in args and name != "no-answer"
]
"""Planned migrations are not in the product yet; without an answer there is no decision."""


@st.composite
def histories(draw: st.DrawFn) -> tuple[Any, bool, bool, bytes]:
    """A scenario, how the product lags or leads the model in it, and a choice for each step."""
    name = draw(st.sampled_from(SCENARIOS))
    late, early = draw(st.booleans()), draw(st.booleans())
    # In the scenario of independent steps the arrival of extras is a step of the model.
    early = early and "independent" not in ARGUMENTS[name]
    return reference(name), late, early, draw(st.binary(min_size=45, max_size=75))


def walk(model: Any, choices: bytes) -> Iterator[tuple[Any, str, Any]]:
    """A history of the model: state, label, state; a fault about once in eight steps."""
    state = model.initial()
    for choice in choices:
        moves = [move for move in model.successors(state) if move[1] != state]
        faults = [move for move in moves if move[2]]
        others = [move for move in moves if not move[2]]
        pool = faults if faults and (choice >= 224 or not others) else others
        if not pool:
            return
        label, after, _ = pool[choice % len(pool)]
        after = model.gc(after)
        yield state, label, after
        state = after


@settings(max_examples=120, deadline=None)
@given(histories())
def test_the_product_does_what_the_exhaustive_model_does(
    history: tuple[Any, bool, bool, bytes],
) -> None:
    model, late, early, choices = history
    product = Product(model, late=late, early=early)
    assert not list(differences(product, model.initial()))
    for before, label, after in walk(model, choices):
        follow(product, before, label, after)
        copy = Product(model, early=early, gave_up=product.gave_up)
        copy.positions = list(product.positions)
        assert not list(differences(copy, after)), label


# ---- late and repeated messages


def heard(
    product: Product, model: Any, state: Any
) -> Iterator[tuple[int, str, Callable[[Position], Position | None], bool]]:
    """Messages on their way that a live worker may hear now, and whether the model obeys them."""
    workers, assignments, messages = state[0], state[1], state[4]
    for m in sorted(messages, key=repr):
        kind, generation = m[0], m[1]
        for rank, i in enumerate(assignments[generation - 1]):
            w = workers[i]
            if w[ST] != "u":
                continue
            promised = w[PR] == generation and w[GEN] < generation
            if kind == "R" and rank and model.parent[rank] == m[3]:
                waits = "VF" if m[4] == "c" else "VFCG"
                obeyed = (w[GEN], w[AP]) == (generation, m[2]) and w[PH] in waits
                yield i, f"result {m}", _result(generation, m[2], m[4] == "c"), obeyed
            elif kind == "Q":
                obeyed = w[GEN] < generation and w[PR] <= generation
                yield i, f"collect {m}", _collect(generation), obeyed
            elif kind == "D":
                bound = w[PH] in "PHBDR" and not (w[PH] == "R" and w[RD] >= generation)
                yield i, f"decided {m}", _obey(generation, m[3]), promised and bound
                empty = w[PH] == "S" and not w[GEN]
                dirty = w[PH] == "R" and w[RD] == generation and product.positions[i].dirty
                pulls = promised and (empty or dirty)
                yield i, f"restored {m}", _restored(generation, m[3]), pulls
            elif kind == "S":
                ready = promised and w[PH] == "R" and w[RD] == generation
                yield i, f"resume {m}", _resume(generation, m[2], model.N), ready


def _result(generation: int, step: int, ok: bool) -> Callable[[Position], Position | None]:
    return lambda p: commit.result(p, generation, step, ok)


def _collect(generation: int) -> Callable[[Position], Position | None]:
    return lambda p: commit.collect(p, generation)


def _obey(generation: int, target: int) -> Callable[[Position], Position | None]:
    return lambda p: commit.obey(p, generation, target)


def _restored(generation: int, target: int) -> Callable[[Position], Position | None]:
    return lambda p: commit.restored(p, generation, target)


def _resume(generation: int, target: int, steps: int) -> Callable[[Position], Position | None]:
    return lambda p: commit.resume(p, generation, target, last=target == steps)


def wrongly_heard(product: Product, model: Any, state: Any) -> Iterator[str]:
    for i, words, function, obeyed in heard(product, model, state):
        if obeyed:
            continue
        p = product.positions[i]
        try:
            after = function(p)
        except ProtocolError as error:
            yield f"worker {i} in {p} hears {words}: {error}"
            continue
        if after not in (None, p):
            yield f"worker {i} in {p} hears {words} and is {after}"
