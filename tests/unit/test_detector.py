"""Literal events in, literal verdicts out."""

from collections.abc import Mapping, Sequence

import pytest

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    Exit,
    FaultInjected,
    InterruptionAnnounced,
    InterruptionCancelled,
    JobCompleted,
    JobSubmitted,
    LayoutAssigned,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationSwitched,
    PeerLost,
    Replacement,
    UserError,
    WorkerExited,
    WorkerFailed,
    WorkerFinished,
    WorkerStarted,
)
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Inputs
from trainmover.services.detector.decide import SERVICE, State, decide, evolve, explain

J = {"job": "j", "run": "r1"}
ERROR = UserError(
    exception="ValueError", message="no", traceback="Traceback", rank=1, step=7, committed=7
)


def submitted() -> JobSubmitted:
    return JobSubmitted(
        **J,
        layout=Layout.parse("dp=2"),
        workers_per_machine=2,
        num_standbys=1,
        script_digest="d",
        host="h",
    )


def started(worker: str, machine: str = "m0") -> WorkerStarted:
    return WorkerStarted(**J, worker=worker, machine=machine, local_index=0, pid=7)


def exited(*exits: Exit, machine: str = "m0") -> WorkerExited:
    return WorkerExited(**J, machine=machine, exits=exits)


def finished(worker: str) -> WorkerFinished:
    return WorkerFinished(**J, worker=worker, rank=0, generation=1, committed=10, digest="ab")


def peer_lost(worker: str, peer: str, generation: int = 1) -> PeerLost:
    return PeerLost(
        **J, worker=worker, peer=peer, generation=generation, channel="control", cause="EOF"
    )


def planned(leaver: str, joiner: str) -> MigrationPlanned:
    replacement = Replacement(rank=0, leaver=leaver, joiner=joiner)
    return MigrationPlanned(
        **J,
        generation=2,
        incident="g2",
        kind="crash",
        replacements=(replacement,),
        members=(),
        reason="",
    )


def failed(worker: str, kind: str = "crash") -> WorkerFailed:
    return WorkerFailed.model_validate(
        {
            **J,
            "workers": (worker,),
            "kind": kind,
            "machine": "m0",
            "evidence": "",
            "reason": "",
            "first_evidence": 1.0,
        }
    )


def fold(*timed: tuple[float, Event]) -> State:
    """The state after a submission at 0 s, w0 and w1 on m0 and w2 on m1 at 1 s, and `timed`."""
    start: list[tuple[float, Event]] = [(0.0, submitted())]
    start += [(1.0, started("w0")), (1.0, started("w1")), (1.0, started("w2", "m1"))]
    state = SERVICE.initial
    for seq, (time_s, event) in enumerate([*start, *timed], 1):
        state = evolve(state, Recorded(seq=seq, time_s=time_s, event=event))
    return state


def verdicts(
    state: State,
    now_s: float = 11.0,
    up_since_s: float = 0.0,
    heard: Mapping[str, float] | None = None,
) -> Sequence[Event]:
    """What is decided while both machines are heard, unless `heard` says otherwise."""
    heard = {"m0": now_s, "m1": now_s} if heard is None else heard
    return decide(state, Inputs(now_s=now_s, up_since_s=up_since_s, heard=heard))


def test_a_worker_killed_by_a_signal_is_a_crash_at_once() -> None:
    state = fold((10.0, exited(Exit(worker="w1", code=-9))))
    assert verdicts(state, now_s=10.0) == (
        WorkerFailed(
            **J,
            workers=("w1",),
            kind="crash",
            machine="m0",
            evidence="w1 was killed by SIGKILL",
            reason="the agent saw w1 end",
            first_evidence=10.0,
        ),
    )


def test_exits_of_one_event_are_one_verdict_with_their_errors() -> None:
    state = fold((10.0, exited(Exit(worker="w0", code=1, error=ERROR), Exit(worker="w1", code=-6))))
    (verdict,) = verdicts(state)
    assert isinstance(verdict, WorkerFailed)
    assert verdict.workers == ("w0", "w1")
    assert verdict.errors == (ERROR,)
    assert verdict.evidence == "w0 exited with code 1; w1 was killed by SIGABRT"
    assert verdict.reason == "w0 raised ValueError in step 7; the agent saw w1 end"


def test_a_verdict_is_repeated_until_the_stream_shows_it_and_then_never_again() -> None:
    crash = (10.0, exited(Exit(worker="w1", code=-9)))
    (verdict,) = verdicts(fold(crash))
    assert verdicts(fold(crash)) == (verdict,)
    assert verdicts(fold(crash, (10.1, verdict))) == ()
    assert verdicts(fold(crash, (10.1, verdict), (10.2, crash[1]))) == ()


def test_only_the_workers_without_a_verdict_are_named() -> None:
    exits = exited(Exit(worker="w0", code=-9), Exit(worker="w1", code=-9))
    (verdict,) = verdicts(fold((9.0, failed("w0")), (10.0, exits)))
    assert isinstance(verdict, WorkerFailed)
    assert verdict.workers == ("w1",)


def test_exit_code_zero_before_the_steps_are_finished_is_a_crash_that_says_so() -> None:
    (verdict,) = verdicts(fold((10.0, exited(Exit(worker="w0", code=0)))))
    assert isinstance(verdict, WorkerFailed)
    assert verdict.reason == "w0 ended with exit code 0 before it had finished its steps"


def test_a_finished_worker_may_exit() -> None:
    state = fold((9.0, finished("w0")), (10.0, exited(Exit(worker="w0", code=0))))
    assert verdicts(state) == ()
    assert state.exits == ()


def test_a_finished_worker_that_is_killed_has_failed() -> None:
    state = fold((9.0, finished("w0")), (10.0, exited(Exit(worker="w0", code=-9))))
    assert len(verdicts(state)) == 1


def test_a_replaced_worker_may_exit_as_it_likes() -> None:
    state = fold((9.0, planned("w0", "w2")), (10.0, exited(Exit(worker="w0", code=-9))))
    assert verdicts(state) == ()


def switched(generation: int) -> MigrationSwitched:
    return MigrationSwitched(**J, generation=generation, incident="g2", target=7)


def test_who_gives_its_rank_away_is_missed_until_the_switch_and_may_go_then() -> None:
    move = planned("w0", "w2").model_copy(update={"kind": "planned"})
    gone = (10.0, exited(Exit(worker="w0", code=-9)))
    (verdict,) = verdicts(fold((9.0, move), gone))
    assert isinstance(verdict, WorkerFailed)
    assert verdict.workers == ("w0",)
    assert verdicts(fold((9.0, move), (9.5, switched(2)), gone)) == ()
    assert verdicts(fold((9.0, move), gone, (10.5, switched(2)))) == ()


def test_a_leaver_that_is_back_in_its_rank_is_missed_after_the_switch_as_well() -> None:
    move = planned("w0", "w2").model_copy(update={"kind": "planned"})
    back = move.model_copy(update={"generation": 3, "kind": "relink", "replacements": ()})
    gone = (10.0, exited(Exit(worker="w0", code=-9)))
    (verdict,) = verdicts(fold((9.0, move), (9.2, back), (9.5, switched(3)), gone))
    assert isinstance(verdict, WorkerFailed)
    assert verdict.workers == ("w0",)


@pytest.mark.parametrize("dies", [False, True])
def test_a_joiner_that_could_not_be_prepared_may_go_and_one_that_died_before_is_missed(
    dies: bool,
) -> None:
    move = planned("w0", "w2").model_copy(update={"kind": "planned"})
    names = {"generation": 2, "incident": "g2", "reason": "late", "missing": ("w2",)}
    dropped = (10.0, MigrationAborted.model_validate({**J, **names}))
    gone = (9.5 if dies else 10.5, exited(Exit(worker="w2", code=-9 * dies), machine="m1"))
    events = sorted((dropped, gone), key=lambda timed: timed[0])
    assert bool(verdicts(fold((9.0, move), *events))) is dies


@pytest.mark.parametrize(
    ("said", "missed"),
    [(("decided",), False), ((), True), (("aborted",), True), (("aborted", "decided"), True)],
)
def test_a_joiner_whose_leaver_is_back_may_go_if_the_move_was_decided(
    said: tuple[str, ...], missed: bool
) -> None:
    """If it was not it is a standby as before, whose death leaves the pool one short."""
    move = planned("w0", "w2").model_copy(update={"kind": "planned"})
    back = move.model_copy(update={"generation": 3, "kind": "relink", "replacements": ()})
    names = {"generation": 2, "incident": "g2"}
    events = {
        "decided": MigrationDecided.model_validate({**J, **names, "target": 7}),
        "aborted": MigrationAborted.model_validate({**J, **names, "reason": "late"}),
    }
    gone = (10.0, exited(Exit(worker="w2", code=0), machine="m1"))
    timed = ((9.0 + i / 10, events[name]) for i, name in enumerate(said, 1))
    found = verdicts(fold((9.0, move), *timed, (9.5, back), gone))
    assert bool(found) is missed


def test_nothing_is_a_failure_after_the_end_of_the_job() -> None:
    over = JobCompleted(**J, completed_steps=10, state_digest="ab")
    state = fold((9.0, over), (10.0, exited(Exit(worker="w0", code=-9))))
    assert verdicts(state, now_s=99.0, heard={}) == ()


def test_a_signal_without_a_name_is_given_by_its_number() -> None:
    (verdict,) = verdicts(fold((10.0, exited(Exit(worker="w1", code=-42)))))
    assert isinstance(verdict, WorkerFailed)
    assert verdict.evidence == "w1 was killed by signal 42"


def test_the_first_evidence_of_a_crash_is_the_first_link_that_broke_not_the_injection() -> None:
    injected = FaultInjected(**J, kind="kill", worker="w1")
    state = fold(
        (9.90, injected),
        (9.96, peer_lost("w2", "w1")),
        (10.0, exited(Exit(worker="w1", code=-9))),
    )
    (verdict,) = verdicts(state)
    assert isinstance(verdict, WorkerFailed)
    assert verdict.first_evidence == 9.96


def test_a_link_that_broke_long_before_a_crash_is_no_evidence_for_it() -> None:
    state = fold((3.0, peer_lost("w2", "w1")), (10.0, exited(Exit(worker="w1", code=-9))))
    (verdict,) = verdicts(state)
    assert isinstance(verdict, WorkerFailed)
    assert verdict.first_evidence == 10.0


@pytest.mark.parametrize("now_s", [11.0, 11.99])
def test_a_machine_that_is_silent_for_less_than_two_seconds_is_left_alone(now_s: float) -> None:
    assert verdicts(fold(), now_s=now_s, heard={"m0": 10.0, "m1": now_s}) == ()


def test_a_machine_that_is_silent_for_two_seconds_is_lost_with_all_its_live_workers() -> None:
    state = fold((9.0, started("w3")), (9.5, failed("w1")))
    assert verdicts(state, now_s=12.0, heard={"m0": 10.0, "m1": 12.0}) == (
        WorkerFailed(
            **J,
            workers=("w0", "w3"),
            kind="machine_lost",
            machine="m0",
            evidence="no telemetry of m0 for 2 s",
            reason="nothing shows that m0 lives",
            first_evidence=10.0,
        ),
    )


def test_telemetry_that_comes_again_ends_the_suspicion() -> None:
    state = fold()
    before = Inputs(now_s=11.5, up_since_s=0.0, heard={"m0": 10.0, "m1": 11.5})
    assert explain(state, before) == ("m0 is silent for 1 s: failed after 2 s",)
    again = Inputs(now_s=12.1, up_since_s=0.0, heard={"m0": 11.9, "m1": 12.1})
    assert decide(state, again) == ()
    assert explain(state, again) == ()


def test_after_an_outage_of_the_bus_a_machine_has_two_seconds_to_come_back_to_it() -> None:
    assert verdicts(fold(), now_s=53.9, up_since_s=50.0, heard={"m0": 10.0}) == ()
    lost = verdicts(fold(), now_s=54.0, up_since_s=50.0, heard={"m0": 10.0})
    assert len(lost) == 2
    seen = fold((50.5, peer_lost("w0", "w2")))
    assert verdicts(seen, now_s=52.9, up_since_s=50.0, heard={"m0": 52.9}) == ()
    (witnessed,) = verdicts(seen, now_s=53.0, up_since_s=50.0, heard={"m0": 53.0})
    assert isinstance(witnessed, WorkerFailed)
    assert witnessed.evidence == "no telemetry of m1 for 1 s; links to it lost by w0"


def test_nobody_is_silent_while_this_service_has_no_bus() -> None:
    assert verdicts(fold(), now_s=60.0, up_since_s=60.0, heard={"m0": 10.0, "m1": 10.0}) == ()


def test_a_machine_that_was_heard_after_an_outage_has_no_time_left_over() -> None:
    assert len(verdicts(fold(), now_s=52.1, up_since_s=50.0, heard={"m0": 52.1, "m1": 50.1})) == 1


def test_a_machine_never_heard_is_lost_two_seconds_after_its_agent_last_stored_an_event() -> None:
    assert verdicts(fold(), now_s=2.9, heard={}) == ()
    assert len(verdicts(fold(), now_s=3.0, heard={})) == 2
    assert verdicts(fold((2.5, started("w3"))), now_s=3.0, heard={"m1": 3.0}) == ()


def test_a_machine_without_live_workers_may_be_silent() -> None:
    state = fold((9.0, planned("w2", "w3")))
    assert verdicts(state, now_s=20.0, heard={"m0": 20.0}) == ()


def test_a_lost_link_makes_one_second_of_silence_enough() -> None:
    state = fold((10.1, peer_lost("w0", "w2")), (10.2, peer_lost("w1", "w2")))
    assert verdicts(state, now_s=10.9, heard={"m0": 10.9, "m1": 10.0}) == ()
    (verdict,) = verdicts(state, now_s=11.0, heard={"m0": 11.0, "m1": 10.0})
    assert isinstance(verdict, WorkerFailed)
    assert (verdict.workers, verdict.kind) == (("w2",), "machine_lost")
    assert verdict.evidence == "no telemetry of m1 for 1 s; links to it lost by w0, w1"
    assert verdict.first_evidence == 10.1


def test_a_link_lost_before_the_last_telemetry_is_no_second_witness() -> None:
    state = fold((10.1, peer_lost("w0", "w2")))
    assert verdicts(state, now_s=21.5, heard={"m0": 21.5, "m1": 20.0}) == ()


def test_a_lost_link_to_a_machine_that_is_heard_is_not_acted_on_and_says_why() -> None:
    state = fold((10.1, peer_lost("w0", "w2")))
    inputs = Inputs(now_s=99.0, up_since_s=0.0, heard={"m0": 99.0, "m1": 98.9})
    assert decide(state, inputs) == ()
    assert explain(state, inputs) == (
        "w0 lost the link to w2: not failed while m1 is heard; a broken link needs a relink only",
    )


def test_a_suspicion_is_closed_by_the_generation_that_made_the_link_again() -> None:
    completed = MigrationCompleted(**J, generation=2, incident="g2", committed=8)
    state = fold((10.1, peer_lost("w0", "w2")), (10.5, completed))
    assert explain(state, Inputs(now_s=11.0, up_since_s=0.0, heard={"m0": 11.0, "m1": 11.0})) == ()


def test_what_is_acted_on_is_no_open_suspicion() -> None:
    state = fold((10.1, peer_lost("w0", "w2")))
    inputs = Inputs(now_s=11.2, up_since_s=0.0, heard={"m0": 11.2, "m1": 10.0})
    assert len(decide(state, inputs)) == 1
    assert explain(state, inputs) == ()


def test_a_worker_that_is_gone_is_not_missed_when_its_start_is_told_again() -> None:
    state = fold((9.0, failed("w2", "machine_lost")), (10.0, started("w2", "m1")))
    assert verdicts(state, now_s=20.0, heard={"m0": 20.0}) == ()


def test_a_huge_loss_still_fits_an_event() -> None:
    exits = tuple(Exit(worker=f"worker-{'x' * 40}-{i}", code=-9) for i in range(500))
    (verdict,) = verdicts(fold((10.0, exited(*exits))))
    assert isinstance(verdict, WorkerFailed)
    assert len(verdict.workers) == 500


def test_a_standby_of_a_drained_machine_may_go_and_who_holds_a_rank_there_may_not() -> None:
    drain = InterruptionAnnounced(**J, interruption="d", kind="preemption", machine="m1")
    members = tuple(
        Member(rank=rank, worker=worker, machine="m1", addresses=())
        for rank, worker in enumerate(("w2", "w9"))
    )
    ranks = (8.0, LayoutAssigned(**J, members=members))
    gone = exited(Exit(worker="w2", code=-15), Exit(worker="w3", code=-15), machine="m1")
    (verdict,) = verdicts(fold(ranks, (9.0, drain), (10.0, gone)))
    assert isinstance(verdict, WorkerFailed)
    assert verdict.workers == ("w2",)
    cancelled = InterruptionCancelled(**J, interruption="d")
    (verdict,) = verdicts(fold(ranks, (9.0, drain), (9.5, cancelled), (10.0, gone)))
    assert isinstance(verdict, WorkerFailed)
    assert verdict.workers == ("w2", "w3")
