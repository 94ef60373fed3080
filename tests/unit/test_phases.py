"""Spans of an incident from its events: the chain from the first evidence to the end."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planner_histories import (
    ASSIGNED,
    B_TO_D,
    A,
    C,
    J,
    aborted,
    announced,
    cancelled,
    completed,
    decided,
    failed,
    member,
    peer_lost,
    plan,
    step_aborted,
    submitted,
    switched,
)

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    Exit,
    FaultInjected,
    JobCompleted,
    JobFailed,
    MigrationPrepared,
    WorkerExited,
)
from trainmover.schemas.recorded import Recorded
from trainmover.schemas.trace import ROOT
from trainmover.telemetry.incident import Closed
from trainmover.telemetry.phases import State, step
from trainmover.telemetry.spans import Span, ns

History = Sequence[tuple[float, Event] | tuple[float, Event, float]]
"""When it was stored, what, and when it happened if that is known."""

RELINK = plan(2, members=(A, member(1, "b"), C), reason="a lost its link to b")
AGAIN = plan(3, (1, "b", "d"), members=B_TO_D.members, reason="too late")
C_TO_E = plan(
    3, (1, "b", "d"), (2, "c", "e"), members=(A, member(1, "d"), member(2, "e")), reason="c died"
)
DONE = JobCompleted(**J, completed_steps=9, state_digest="d")


def exited(*workers: str, machine: str = "m0") -> WorkerExited:
    exits = tuple(Exit(worker=worker, code=-9) for worker in workers)
    return WorkerExited(**J, machine=machine, exits=exits)


def injected(worker: str) -> FaultInjected:
    return FaultInjected(**J, kind="kill", worker=worker, rank=1, step=7)


def closed_by(history: History) -> list[Closed]:
    state, found = State(), list[Closed]()
    for seq, (time_s, event, *occurred) in enumerate(
        [(0.0, submitted()), (1.0, ASSIGNED), *history], 1
    ):
        state, closed = step(state, Recorded(seq, time_s, event, *occurred))
        found += closed
    return found


def spans(history: History) -> dict[str, Span]:
    found = [closed.span for closed in closed_by(history)]
    assert len({(s.incident, s.name) for s in found}) == len(found)
    return {span.name: span for span in found}


def chain(found: dict[str, Span]) -> list[tuple[str, float, float]]:
    """Children of the root, which must follow each other from its start to its end."""
    root = found[ROOT]
    children = sorted(
        (s for s in found.values() if s.parent == ROOT and not s.name.startswith("exit ")),
        key=lambda s: (s.start_ns, s.end_ns),
    )
    assert children[0].start_ns == root.start_ns
    assert children[-1].end_ns == root.end_ns
    assert all(before.end_ns == after.start_ns for before, after in pairwise(children))
    return [(s.name, s.start_ns / 1e9, s.end_ns / 1e9) for s in children]


CRASH: History = [
    (9.0, injected("b")),
    (9.5, peer_lost("a", "b")),
    (9.6, exited("b"), 9.2),
    (10.0, failed("b").model_copy(update={"first_evidence": 9.5})),
    (11.0, B_TO_D),
    (12.0, decided(2, 7)),
    (13.0, switched(2)),
    (14.0, completed(2)),
]
PHASES = [
    ("detect g2", 9.0, 10.0),
    ("plan g2", 10.0, 11.0),
    ("collect g2", 11.0, 12.0),
    ("move g2", 12.0, 13.0),
    ("resume g2", 13.0, 14.0),
]


def test_a_death_is_detected_planned_collected_moved_and_resumed() -> None:
    found = spans(CRASH)
    assert chain(found) == PHASES
    assert found[ROOT].attributes == {
        "kind": "crash",
        "outcome": "completed",
        "generations": (2,),
        "leavers": ("b",),
        "joiners": ("d",),
        "ranks": (1,),
        "lost_steps": 0,
    }
    assert not any(span.error for span in found.values())


def test_each_span_is_for_the_process_that_answers_for_its_phase() -> None:
    assert {closed.span.name: closed.by for closed in closed_by(CRASH)} == {
        "detect g2": "detector",
        "exit b": "agent/m0",
        "plan g2": "planner",
        "collect g2": "mover",
        "move g2": "mover",
        "resume g2": "mover",
        ROOT: "mover",
    }


def test_the_exit_of_a_leaver_lasts_until_it_is_stored_and_belongs_to_its_detection() -> None:
    exit = spans(CRASH)["exit b"]
    assert (exit.parent, exit.start_ns, exit.end_ns) == ("detect g2", ns(9.2), ns(9.6))
    assert exit.attributes == {"worker": "b", "machine": "m0", "code": -9}


def test_without_a_drill_an_incident_begins_with_the_end_of_the_process() -> None:
    assert chain(spans(CRASH[1:]))[0] == ("detect g2", 9.2, 10.0)


@pytest.mark.parametrize("occurred", [-60.0, 9.7])
def test_an_agent_whose_clock_is_off_is_not_believed(occurred: float) -> None:
    found = spans([(9.6, exited("b"), occurred), *CRASH[3:]])
    assert found["exit b"].start_ns == found["exit b"].end_ns == ns(9.6)


def test_a_drill_long_before_the_verdict_is_not_its_cause() -> None:
    shifted = [(time_s + 100, *rest) for time_s, *rest in CRASH[2:]]
    late = [CRASH[0], (109.6, exited("b"), 109.2), *shifted[1:]]
    late[2] = (110.0, failed("b").model_copy(update={"first_evidence": 109.5}))
    assert chain(spans(late))[0][1] == 109.2


def test_two_workers_that_die_apart_are_one_incident_from_the_first_evidence_on() -> None:
    both = plan(
        2, (1, "b", "d"), (2, "c", "e"), members=(A, member(1, "d"), member(2, "e")), reason=""
    )
    found = spans(
        [
            (9.0, exited("b"), 8.9),
            (9.1, exited("c", machine="m1"), 9.0),
            (9.2, failed("b").model_copy(update={"first_evidence": 9.0})),
            (9.3, failed("c").model_copy(update={"first_evidence": 9.1})),
            (11.0, both),
            (12.0, decided(2, 7)),
            (13.0, switched(2)),
            (14.0, completed(2)),
        ]
    )
    assert chain(found)[:2] == [("detect g2", 8.9, 9.2), ("plan g2", 9.2, 11.0)]
    assert {"exit b", "exit c"} <= found.keys()
    assert found[ROOT].attributes["leavers"] == ("b", "c")


def test_a_broken_link_is_only_planned_from_its_first_sign_on() -> None:
    found = spans(
        [
            (9.0, peer_lost("a", "b")),
            (9.1, step_aborted("c")),
            (9.4, RELINK),
            (9.5, decided(2, 6)),
            (9.6, switched(2)),
            (9.9, completed(2)),
        ]
    )
    assert [name for name, *_ in chain(found)] == ["plan g2", "collect g2", "move g2", "resume g2"]
    assert found["plan g2"].start_ns == ns(9.0)
    assert found[ROOT].attributes["kind"] == "relink"
    assert found[ROOT].attributes["lost_steps"] == 1


def test_a_drill_that_cuts_a_link_begins_one_incident_and_no_other() -> None:
    cut = injected("b").model_copy(update={"kind": "cut"})
    found = spans(
        [
            (8.9, cut),
            (9.0, peer_lost("a", "b")),
            (9.4, RELINK),
            (9.9, completed(2)),
            (20.0, peer_lost("a", "b", generation=2)),
            (20.4, RELINK.model_copy(update={"generation": 3, "incident": "g3"})),
        ]
    )
    assert found["plan g2"].start_ns == found[ROOT].start_ns == ns(8.9)
    assert found["plan g3"].start_ns == ns(20.0)


def test_a_death_that_was_planned_as_a_broken_link_begins_with_the_death_all_the_same() -> None:
    found = spans(
        [
            *CRASH[:3],
            (9.8, RELINK),
            *((10.0 + i / 10, event) for i, event in enumerate([CRASH[3][1], AGAIN, completed(3)])),
        ]
    )
    assert chain(found)[:3] == [
        ("plan g2", 9.0, 9.8),
        ("collect g2", 9.8, 9.8),
        ("detect g3", 9.8, 10.0),
    ]
    assert found["exit b"].parent == "detect g3"
    assert found[ROOT].attributes["kind"] == "crash"  # as the report has it


def test_signs_of_an_older_generation_do_not_begin_an_incident() -> None:
    found = spans(
        [
            *CRASH,
            (14.5, peer_lost("c", "b", generation=1)),
            (20.0, peer_lost("a", "c", generation=2)),
            (20.4, plan(3, members=B_TO_D.members, reason="", incident="g3")),
        ]
    )
    assert found["plan g3"].start_ns == ns(20.0)


def test_after_an_abort_it_is_planned_again_without_a_gap() -> None:
    found = spans(
        [
            *CRASH[:5],
            (12.0, aborted(2)),
            (12.5, AGAIN),
            (13.0, decided(3, 7)),
            (13.2, aborted(3)),
            (13.3, AGAIN.model_copy(update={"generation": 4})),
            (13.4, decided(4, 7)),
            (13.5, switched(4)),
            (14.0, completed(4)),
        ]
    )
    assert [name for name, *_ in chain(found)] == [
        *("detect g2", "plan g2", "collect g2", "plan g3", "collect g3", "move g3"),
        *("plan g4", "collect g4", "move g4", "resume g4"),
    ]
    assert [s.name for s in found.values() if s.error] == ["collect g2", "move g3"]
    assert found[ROOT].attributes["generations"] == (2, 3, 4)


def test_a_verdict_that_comes_after_the_abort_is_detected_between_it_and_the_plan() -> None:
    found = spans(
        [
            *CRASH[:5],
            (11.2, exited("c"), 11.1),
            (12.0, aborted(2, "c")),
            (12.3, failed("c").model_copy(update={"first_evidence": 11.1})),
            (12.5, C_TO_E),
            (13.0, completed(3)),
        ]
    )
    assert chain(found)[2:5] == [
        ("collect g2", 11.0, 12.0),
        ("detect g3", 12.0, 12.3),
        ("plan g3", 12.3, 12.5),
    ]
    assert found["exit c"].parent == "detect g3"


def test_the_exit_of_a_worker_that_was_replaced_for_its_silence_is_below_the_root() -> None:
    found = spans(
        [
            *CRASH[:5],
            (11.2, exited("c"), 11.1),
            (12.0, aborted(2, "c")),
            (12.5, C_TO_E),
            (13.0, completed(3)),
        ]
    )
    assert found["exit c"].parent == ROOT
    assert chain(found)[3] == ("plan g3", 12.0, 12.5)


def test_a_second_death_ends_the_phase_that_it_disturbs_and_is_detected_itself() -> None:
    found = spans(
        [
            *CRASH[:6],
            (12.3, exited("c"), 12.2),
            (12.4, failed("c").model_copy(update={"first_evidence": 12.25})),
            (12.6, C_TO_E),
            (12.7, decided(3, 7)),
            (12.8, switched(3)),
            (14.0, completed(3)),
        ]
    )
    assert chain(found)[3:6] == [
        ("move g2", 12.0, 12.2),
        ("detect g3", 12.2, 12.4),
        ("plan g3", 12.4, 12.6),
    ]
    assert found["move g2"].error == "superseded by generation 3: c died"
    assert found["exit c"].parent == "detect g3"
    assert found[ROOT].attributes["leavers"] == ("b", "c")


def test_evidence_that_is_older_than_the_phase_it_disturbs_leaves_no_gap_and_no_overlap() -> None:
    found = spans(
        [
            *CRASH[:5],
            (11.5, failed("c").model_copy(update={"first_evidence": 10.5})),
            (12.0, decided(2, 7)),  # decided before the mover knew
            (12.6, C_TO_E),
            (12.7, decided(3, 7)),
            (12.8, switched(3)),
            (14.0, completed(3)),
        ]
    )
    assert chain(found)[3:6] == [
        ("move g2", 12.0, 12.0),
        ("detect g3", 12.0, 12.0),
        ("plan g3", 12.0, 12.6),
    ]


@pytest.mark.parametrize(
    ("history", "last"),
    [(CRASH[:6], "move g2"), ([*CRASH[:6], (12.5, aborted(2, state_lost=True))], "plan g3")],
)
def test_the_end_of_a_job_closes_its_incident_with_the_reason(history: History, last: str) -> None:
    end = JobFailed(**J, reason="nobody holds the shard", exit_code=4)
    found = spans([*history, (13.0, end)])
    assert chain(found)[-1][0] == last
    assert found[last].error == found[ROOT].error == "nobody holds the shard"
    assert found[ROOT].attributes["outcome"] == "failed"


def test_a_job_that_is_completed_first_completes_its_incident() -> None:
    found = spans([*CRASH[:7], (13.5, DONE)])
    assert chain(found)[-1] == ("resume g2", 13.0, 13.5)
    assert not found[ROOT].error


def test_incidents_of_a_job_do_not_mix() -> None:
    second = [
        (20.0, failed("c").model_copy(update={"first_evidence": 19.0})),
        (
            21.0,
            C_TO_E.model_copy(update={"incident": "g3", "replacements": C_TO_E.replacements[1:]}),
        ),
        (22.0, decided(3, 9, "g3")),
        (23.0, switched(3)),
        (24.0, completed(3, "g3")),
    ]
    of_each = {
        name: {s.span.name: s.span for s in closed_by([*CRASH, *second]) if s.span.incident == name}
        for name in ("g2", "g3")
    }
    assert chain(of_each["g2"]) == PHASES
    assert chain(of_each["g3"])[0][0] == "detect g3"
    assert of_each["g3"][ROOT].attributes["leavers"] == ("c",)


# ---- a planned switch


def prepared(generation: int = 2, incident: str = "g2") -> MigrationPrepared:
    return MigrationPrepared(**J, generation=generation, incident=incident)


B_MOVES = B_TO_D.model_copy(
    update={"kind": "planned", "leavers": (member(1, "b"),), "reason": "b is to go"}
)
MOVE: History = [
    (9.0, announced("b")),
    (9.5, B_MOVES),
    (11.0, prepared()),
    (11.5, decided(2, 7)),
    (12.0, switched(2)),
    (12.5, completed(2)),
]
MOVE_PHASES = [
    ("plan g2", 9.0, 9.5),
    ("prepare g2", 9.5, 11.0),
    ("freeze g2", 11.0, 11.5),
    ("move g2", 11.5, 12.0),
    ("resume g2", 12.0, 12.5),
]


def test_a_move_is_planned_prepared_frozen_moved_and_resumed() -> None:
    found = spans(MOVE)
    assert chain(found) == MOVE_PHASES
    assert found[ROOT].attributes == {
        "kind": "planned",
        "outcome": "completed",
        "generations": (2,),
        "leavers": ("b",),
        "joiners": ("d",),
        "ranks": (1,),
        "lost_steps": 0,
    }
    assert not any(span.error for span in found.values())
    assert {c.span.name: c.by for c in closed_by(MOVE)} == {
        "plan g2": "planner",
        **dict.fromkeys(("prepare g2", "freeze g2", "move g2", "resume g2", ROOT), "mover"),
    }


def test_a_move_without_an_announcement_begins_with_its_plan() -> None:
    assert chain(spans(MOVE[1:]))[0] == ("plan g2", 9.5, 9.5)


def test_a_move_begins_with_the_oldest_announcement_that_stands_also_of_its_machine() -> None:
    drain = announced(name="drain", machine="m0")
    assert chain(spans([(7.0, drain), *MOVE]))[0] == ("plan g2", 7.0, 9.5)
    other = announced(name="other", machine="m7")
    assert chain(spans([(7.0, other), *MOVE]))[0] == ("plan g2", 9.0, 9.5)
    over = [(7.0, drain), (8.0, cancelled("drain"))]
    assert chain(spans([*over, *MOVE]))[0] == ("plan g2", 9.0, 9.5)


@pytest.mark.parametrize(("until", "last"), [(2, "prepare g2"), (3, "freeze g2")])
def test_a_move_that_is_dropped_has_ended_and_the_next_try_is_another_incident(
    until: int, last: str
) -> None:
    again = B_MOVES.model_copy(update={"generation": 3, "incident": "g3"})
    history = [*MOVE[:until], (11.2, aborted(2, "d")), (11.3, decided(2, 7)), (11.4, again)]
    found = {(c.span.incident, c.span.name): c.span for c in closed_by(history)}
    first = {name: span for (incident, name), span in found.items() if incident == "g2"}
    assert [name for name, *_ in chain(first)][-1] == last
    assert first[last].error == first[ROOT].error == "too late"
    assert first[ROOT].attributes["outcome"] == "aborted"
    assert first[ROOT].end_ns == ns(11.2)
    second = found["g3", "plan g3"]
    assert (second.start_ns, second.end_ns) == (ns(11.2), ns(11.4))


def test_a_death_before_the_decision_ends_the_move_and_is_an_incident_of_its_own() -> None:
    crash = plan(3, (2, "c", "e"), members=(A, member(1, "b"), member(2, "e")), reason="c died")
    history = [
        *MOVE[:3],
        (11.1, peer_lost("a", "c")),
        (11.2, failed("c").model_copy(update={"first_evidence": 11.15})),
        (11.3, crash.model_copy(update={"incident": "g3"})),
        (11.4, decided(3, 7, "g3")),
        (11.5, switched(3)),
        (11.6, completed(3, "g3")),
    ]
    found: dict[str, dict[str, Span]] = {"g2": {}, "g3": {}}
    for closed in closed_by(history):
        found[closed.span.incident][closed.span.name] = closed.span
    assert chain(found["g2"])[-1] == ("freeze g2", 11.0, 11.3)
    assert found["g2"][ROOT].error == "superseded by generation 3: c died"
    assert chain(found["g3"])[0] == ("detect g3", 11.15, 11.2)
    assert found["g3"][ROOT].attributes["kind"] == "crash"


def test_a_link_that_breaks_while_a_move_is_prepared_is_a_sign_of_the_running_generation() -> None:
    relink = RELINK.model_copy(update={"generation": 3, "incident": "g3"})
    history = [*MOVE[:2], (10.0, peer_lost("a", "b", generation=1)), (10.4, relink)]
    (planned,) = [c.span for c in closed_by(history) if c.span.name == "plan g3"]
    assert planned.start_ns == ns(10.0)


def test_a_joiner_that_dies_after_the_decision_is_detected_in_the_same_incident() -> None:
    back = plan(3, members=(A, member(1, "b"), C), reason="b takes its rank back")
    found = spans(
        [
            *MOVE[:4],
            (11.7, exited("d"), 11.6),
            (11.8, failed("d").model_copy(update={"first_evidence": 11.65})),
            (11.9, back),
            (12.0, decided(3, 7)),
            (12.1, switched(3)),
            (12.2, completed(3)),
        ]
    )
    assert chain(found) == [
        *MOVE_PHASES[:3],
        ("move g2", 11.5, 11.6),
        ("detect g3", 11.6, 11.8),
        ("plan g3", 11.8, 11.9),
        ("collect g3", 11.9, 12.0),
        ("move g3", 12.0, 12.1),
        ("resume g3", 12.1, 12.2),
    ]
    assert found["exit d"].parent == "detect g3"
    assert found[ROOT].attributes["kind"] == "crash"  # as the report has it


def test_a_move_that_the_end_of_the_job_overtakes_came_to_nothing() -> None:
    found = spans([*MOVE[:2], (10.0, DONE)])
    assert chain(found)[-1] == ("prepare g2", 9.5, 10.0)
    assert found[ROOT].error == "the job ended first"


MOVES = st.sampled_from(
    [
        *("fault", "exit", "failed", "lost", "aborted step", "plan", "announced", "move"),
        *("prepared", "decided", "switched", "completed", "aborted"),
        *("job failed", "job completed"),
    ]
)


@settings(deadline=None)
@given(st.lists(st.tuples(MOVES, st.sampled_from("abc"), st.integers(0, 3)), max_size=40))
def test_whatever_order_events_come_in_each_root_has_one_chain(
    moves: list[tuple[str, str, int]],
) -> None:
    """Each decision once for a generation, as the stream has it."""
    history, said = list[tuple[float, Event]](), set[tuple[str, int]]()
    generation, incident, undecided, time_s = 1, "", False, 10.0
    for move, worker, tenths in moves:
        time_s += tenths / 10
        evidence = failed(worker).model_copy(update={"first_evidence": time_s - 0.15})
        if move in ("prepared", "decided", "switched", "completed", "aborted"):
            if (move, generation) in said or not incident:
                continue
            if undecided and move in ("switched", "completed"):
                continue  # only a decision leads there
            said.add((move, generation))
            undecided = undecided and move != "decided"
            incident = "" if undecided and move == "aborted" else incident
        elif move in ("plan", "move"):
            if move == "move" and incident and not undecided:
                continue  # the planner waits for the end of the incident
            generation += 1
            incident = f"g{generation}" if undecided or not incident else incident
            undecided = move == "move"
        name = incident or f"g{max(generation, 2)}"
        events: dict[str, Event] = {
            "fault": injected(worker),
            "exit": exited(worker),
            "failed": evidence,
            "lost": peer_lost("a", worker, generation),
            "aborted step": step_aborted(worker, generation),
            "plan": plan(
                max(generation, 2),
                (1, worker, f"{worker}{generation}"),
                members=(A, C),
                reason="",
                incident=name,
            ),
            "announced": announced(worker),
            "move": B_MOVES.model_copy(update={"generation": max(generation, 2), "incident": name}),
            "prepared": prepared(max(generation, 2), name),
            "decided": decided(max(generation, 2), 7, name),
            "switched": switched(max(generation, 2)),
            "completed": completed(max(generation, 2), name),
            "aborted": aborted(max(generation, 2)),
            "job failed": JobFailed(**J, reason="x", exit_code=4),
            "job completed": DONE,
        }
        history.append((time_s, events[move]))
        if move in ("completed", "job failed", "job completed"):
            incident, undecided = "", False
    by_incident: dict[str, dict[str, Span]] = {}
    for closed in closed_by(history):
        of_it = by_incident.setdefault(closed.span.incident, {})
        assert closed.span.name not in of_it
        assert closed.span.start_ns <= closed.span.end_ns
        of_it[closed.span.name] = closed.span
    for of_it in by_incident.values():
        if ROOT in of_it:
            chain(of_it)
    assert sum(ROOT not in of_it for of_it in by_incident.values()) <= 1  # the one under way
