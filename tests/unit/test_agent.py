"""The agent's pure parts: which imports a script names, which workers to start, what is a fact."""

import asyncio
from pathlib import Path

import pytest

from trainmover.agent.imports import import_ahead, source_of, top_level
from trainmover.agent.outbox import Outbox
from trainmover.agent.output import MAX_LINE_BYTES, Lines, label
from trainmover.agent.roster import MAX_EARLY_DEATHS, Roster, next_number
from trainmover.agent.speech import Unfit, open_fact
from trainmover.agent.tracebacks import Folded
from trainmover.bus.port import Refused
from trainmover.schemas.base import Event
from trainmover.schemas.events import JobCompleted, PeerLost, WorkerRegistered
from trainmover.schemas.local import Fact

# ---- imports


def test_only_the_imports_at_the_top_of_a_script_are_named() -> None:
    source = """
from __future__ import annotations
import numpy as np, os.path
from torch.utils import data
try:
    import fast
except ImportError:
    import slow
def f():
    import late
if True:
    import conditional
"""
    assert top_level(source) == (
        "numpy",
        "os.path",
        "torch.utils",
        "torch.utils.data",
        "fast",
        "slow",
    )


def test_a_relative_import_is_resolved_in_its_package() -> None:
    assert top_level("from . import a\nfrom ..b import c", "p.q") == (
        "p.q",
        "p.q.a",
        "p.b",
        "p.b.c",
    )
    assert top_level("from . import a") == ()


def test_a_script_that_does_not_parse_names_no_imports() -> None:
    assert top_level("def (") == ()


def test_the_source_of_a_module_comes_with_its_package() -> None:
    source, package = source_of("trainmover.agent.roster", module=True)
    assert "class Roster" in source
    assert package == "trainmover.agent"


def test_an_import_that_fails_is_left_to_the_script_and_a_threading_one_is_named() -> None:
    counts = iter((1, 1, 2, 2))
    assert import_ahead(("no_such_module", "json", "csv", "stat"), lambda: next(counts)) == "csv"
    assert import_ahead(("no_such_module",), lambda: 1) == ""


# ---- roster


def fresh(size: int = 3) -> Roster:
    return Roster("m", size)


def test_a_machine_starts_with_all_its_places() -> None:
    roster, new = fresh().missing()
    assert [(p.worker, p.local_index) for p in new] == [("m-w0", 0), ("m-w1", 1), ("m-w2", 2)]
    assert roster.missing()[1] == ()


def test_a_worker_that_exits_is_followed_by_a_new_one_in_its_place() -> None:
    roster, _ = fresh().missing()
    roster, new = roster.exited("m-w1").missing()
    assert [(p.worker, p.local_index) for p in new] == [("m-w3", 1)]


def test_workers_that_die_before_they_are_of_use_are_replaced_only_so_often() -> None:
    roster, starts = fresh(1), 0
    for _ in range(2 * MAX_EARLY_DEATHS):
        roster, new = roster.missing()
        starts += len(new)
        for place in new:
            roster = roster.exited(place.worker)
    assert starts == MAX_EARLY_DEATHS
    assert roster.gave_up


def test_a_worker_that_was_of_use_shows_that_workers_can_live() -> None:
    roster = fresh(1)
    for _ in range(2 * MAX_EARLY_DEATHS):
        roster, (place,) = roster.missing()
        roster = roster.useful(place.worker).exited(place.worker)
    assert not roster.gave_up


def test_names_go_on_where_an_earlier_agent_of_the_machine_stopped() -> None:
    assert next_number("m", ["m-w0", "m-w7", "n-w9", "m-x-w8"]) == 8
    assert next_number("m", []) == 0


# ---- facts

LOST = PeerLost(job="j", run="r", worker="w", peer="v", generation=1, channel="ring", cause="EOF")


def fact(event: Event, kind: str | None = None) -> Fact:
    return Fact(id=0, type=kind or event.TYPE, payload=event.model_dump_json(), time=1.0)


def test_a_fact_of_the_worker_is_opened() -> None:
    assert open_fact(fact(LOST), worker="w", job="j", run="r") == LOST


@pytest.mark.parametrize(
    ("worker", "job", "run"), [("other", "j", "r"), ("w", "other", "r"), ("w", "j", "other")]
)
def test_a_fact_about_someone_else_is_unfit(worker: str, job: str, run: str) -> None:
    with pytest.raises(Unfit, match=r"expected peer\.lost of"):
        open_fact(fact(LOST), worker=worker, job=job, run=run)


def test_a_worker_cannot_say_what_is_not_its_business() -> None:
    end = JobCompleted(job="j", run="r", completed_steps=1, state_digest="")
    with pytest.raises(Unfit, match=r"job\.completed"):
        open_fact(fact(end), worker="w", job="j", run="r")
    with pytest.raises(Unfit, match=r"worker\.registered"):
        open_fact(fact(LOST, WorkerRegistered.TYPE), worker="w", job="j", run="r")


class Store:
    """A bus that stores what it is let to."""

    def __init__(self) -> None:
        self.stored: list[Event] = []
        self.open = asyncio.Event()

    async def publish(self, event: Event, time_s: float) -> None:
        if isinstance(event, PeerLost) and event.peer == "slow":
            await self.open.wait()
        if event.run == "refused":
            raise Refused("full")
        self.stored.append(event)


def about(peer: str, run: str = "r") -> PeerLost:
    return LOST.model_copy(update={"peer": peer, "run": run})


async def test_facts_of_a_worker_keep_their_order_and_a_refused_one_does_not_stop_them() -> None:
    store, acknowledged = Store(), list[str]()
    outbox = Outbox(store.publish)
    for event in (about("slow"), about("a", run="refused"), about("b")):
        await outbox.put("w", event, 1.0, lambda peer=event.peer: acknowledged.append(peer))  # type: ignore[misc]
    store.open.set()
    await asyncio.wait_for(outbox.all_drained(), 1.0)
    await outbox.close()
    assert store.stored == [about("slow"), about("b")]
    assert acknowledged == ["slow", "b"]


async def test_a_fact_does_not_wait_for_those_of_another_worker() -> None:
    store = Store()
    outbox = Outbox(store.publish)
    await outbox.put("w", about("slow"), 1.0)
    await outbox.put("v", about("quick"), 1.0)
    await asyncio.wait_for(outbox.drained(["v", "unknown"]), 1.0)
    await outbox.close()
    assert store.stored == [about("quick")]


# ---- output


def cut(*chunks: bytes) -> list[bytes]:
    lines: list[bytes] = []
    protocol = Lines(lines.append, lambda raw: None, lambda: None)
    for chunk in chunks:
        protocol.data_received(chunk)
    protocol.connection_lost(None)
    return lines


def test_lines_are_put_together_from_pieces_and_the_last_needs_no_end() -> None:
    assert cut(b"on", b"e\ntwo\nth", b"ree") == [b"one", b"two", b"three"]


def test_a_progress_bar_ends_its_lines_with_carriage_returns() -> None:
    assert cut(b"10%\r20%\r") == [b"10%", b"20%"]


def test_a_line_without_an_end_is_bounded() -> None:
    assert [len(line) for line in cut(b"x" * MAX_LINE_BYTES, b"y")] == [MAX_LINE_BYTES, 1]


def test_a_line_is_labelled_with_what_its_worker_is() -> None:
    assert label("m-w1", rank=1, phase="step") == "rank 1"
    assert label("m-w1", rank=1, phase="shadow") == "rank 1"
    assert label("m-w5", rank=None, phase="standby") == "standby w5"
    assert label("m-w5", rank=None, phase="starting") == "w5"


TRACEBACK = ("Traceback (most recent call last):", '  File "t.py", line 1', "    f()")


def folded(shown: set[int], *lines: str) -> list[str]:
    fold = Folded(shown)
    return [shown for line in lines for shown in fold.feed(line)] + fold.rest()


def test_a_traceback_is_shown_in_full_once_and_then_named_only() -> None:
    shown: set[int] = set()
    first = ("a", *TRACEBACK, "ValueError: no", "b")
    assert folded(shown, *first) == list(first)
    second = folded(shown, *TRACEBACK, "ValueError: no, rank 1", "b")
    assert second == ["ValueError: no, rank 1 (its traceback stands above)", "b"]
    elsewhere = (*TRACEBACK[:2], "    g()", "ValueError: no")
    assert folded(shown, *elsewhere) == list(elsewhere)


def test_a_traceback_that_is_cut_off_is_shown() -> None:
    assert folded(set(), *TRACEBACK) == list(TRACEBACK)


def test_a_missing_script_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no script"):
        source_of(str(Path("/none.py")), module=False)
