"""The product refines the exhaustive model of the commit protocol, and is deaf where that is.

Each walk through the model is a history with crashes, broken links, wrong suspicions and
doubled movers; the product's own decision functions follow it step by step.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.commit_model import (
    AP,
    ARGUMENTS,
    BAD,
    GEN,
    PH,
    PR,
    RD,
    ST,
    Product,
    differences,
    reference,
)
from tests.unit.commit_steps import STEPS, follow, step_of

from trainmover.runtime import commit
from trainmover.runtime.commit import Position, ProtocolError

SCENARIOS = [name for name in ARGUMENTS if name != "no-answer"]
"""The product always wants all answers."""
SMALL = ("freeze", "one-crash", "chain", "zero", "tail", "exit", "glitch", "run-ahead", "rejoin")
"""Scenarios that are walked completely, the last one as far as `LIMIT`."""
LIMIT = 15_000

Walk = tuple[Product, bytes]
Decision = Callable[[Position], Position | None]


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    """A product at its start, and a choice for each step."""
    name = draw(st.sampled_from(SCENARIOS))
    late, early = draw(st.booleans()), draw(st.booleans())
    if "independent" in ARGUMENTS[name]:
        early = False  # The arrival of extras is a step of the model there.
    choices = draw(st.binary(min_size=45, max_size=75))
    return Product(reference(name), late=late, early=early), choices


def history(model: Any, choices: bytes) -> Iterator[tuple[Any, str, Any]]:
    """State, label, state; a fault about once in eight steps."""
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


@settings(max_examples=250, deadline=None, derandomize=True)
@given(walks())
def test_the_product_does_what_the_exhaustive_model_does(walk: Walk) -> None:
    product, choices = walk
    assert not list(differences(product, product.model.initial()))
    for before, label, after in history(product.model, choices):
        follow(product, before, label, after)
        assert not list(differences(product, after)), label


@pytest.mark.full
def test_the_product_does_so_in_every_state_of_the_small_scenarios() -> None:
    reached = set()
    for name in SMALL:
        model = reference(name)
        start = model.initial()
        seen, queue = {start}, deque([(start, Product(model, late=True))])
        while queue:
            before, product = queue.popleft()
            for label, state, _ in model.successors(before):
                if state == before:
                    continue
                after, fork = model.gc(state), product.fork()
                follow(fork, before, label, after)
                assert not list(differences(fork, after)), (name, before, label)
                reached.add(step_of(label))
                if after not in seen and len(seen) < LIMIT:
                    seen.add(after)
                    queue.append((after, fork))
    assert reached == {step for _, step in STEPS}


# ---- what comes late or again


def unheard(
    product: Product, state: Any, sent: set[Any], kind: str
) -> Iterator[tuple[int, str, Decision]]:
    """Messages of a kind that a live worker may get now and that the model would not obey."""
    workers, assignments = state[0], state[1]
    for m in sorted(sent, key=repr):
        for rank, i in enumerate(assignments[m[1] - 1]):
            w = workers[i]
            sender = product.model.parent.get(rank)
            if w[ST] == "u" and m[0] == KINDS[kind] and (kind != "result" or sender == m[3]):
                obeyed, decision = _judged(kind, m, w, product.model.N)
                if not obeyed:
                    yield i, str(m), decision


KINDS = {"result": "R", "collect": "Q", "decided": "D", "pulled": "D", "resume": "S"}


def _judged(kind: str, m: Any, w: Any, steps: int) -> tuple[bool, Decision]:
    """Whether the model obeys message `m` in worker `w`, and what the product decides."""
    generation = m[1]
    promised = w[PR] == generation and w[GEN] < generation
    ready = w[PH] == "R" and w[RD] == generation
    match kind:
        case "result":
            ok = m[4] == "c"
            open_step = (w[GEN], w[AP]) == (generation, m[2]) and w[PH] in ("VF" if ok else "VFCG")
            return open_step, lambda p: commit.result(p, generation, m[2], ok)
        case "collect":
            fresh = w[GEN] < generation and w[PR] <= generation
            return fresh, lambda p: commit.collect(p, generation)
        case "decided":
            at_boundary = w[PH] in "PHBZDR" and not ready
            return promised and at_boundary, lambda p: commit.obey(p, generation, m[3])
        case "pulled":
            needs_state = (w[PH] == "S" and not w[GEN]) or (ready and w[BAD] == 2)
            return promised and needs_state, lambda p: commit.restored(p, generation, m[3])
        case _:
            last = m[2] == steps
            return promised and ready, lambda p: commit.resume(p, generation, m[2], last=last)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_comes_late_or_again_changes_nothing(kind: str) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(walks())
    def check(walk: Walk) -> None:
        product, choices = walk
        sent: set[Any] = set()
        for before, label, after in history(product.model, choices):
            follow(product, before, label, after)
            sent |= after[4]  # The model forgets what nobody can obey any more.
            for worker, message, decision in unheard(product, after, sent, kind):
                p = product.positions[worker]
                try:
                    heard = decision(p)
                except ProtocolError as error:
                    raise AssertionError(f"{p} fails on {kind} {message}") from error
                assert heard in (None, p), f"{p} obeys {kind} {message}"

    check()
