"""Limits of different parts nest: whoever waits for another waits longer than that one may take."""

from trainmover.agent import agent, telemetry
from trainmover.bus import nats
from trainmover.runtime import handshake, recovery
from trainmover.schemas.commands import ANSWER_WITHIN_S
from trainmover.services.detector.decide import THRESHOLDS
from trainmover.services.mover import decide as mover
from trainmover.services.planner import choice


def test_a_machine_is_silent_for_several_of_its_messages_before_it_counts_as_lost() -> None:
    assert THRESHOLDS.machine_silence_s >= 3 * telemetry.INTERVAL_S
    assert THRESHOLDS.settle_s < THRESHOLDS.witnessed_silence_s < THRESHOLDS.machine_silence_s


def test_a_machine_that_comes_back_to_the_bus_later_than_the_detector_is_not_silent() -> None:
    assert THRESHOLDS.reconnect_s >= nats.LONGEST_WAIT_S
    assert THRESHOLDS.witnessed_silence_s > telemetry.INTERVAL_S


def test_an_exit_that_explains_a_broken_link_arrives_before_the_link_is_opened_again() -> None:
    assert 10 * agent.EXITS_WITHIN_S < choice.SETTLE_S


def test_a_member_is_asked_several_times_before_it_is_left_behind() -> None:
    assert nats.REQUEST_S < ANSWER_WITHIN_S
    assert 3 * ANSWER_WITHIN_S < mover.COLLECT_S


def test_a_piece_of_a_recovery_ends_by_itself_before_the_mover_gives_the_plan_up() -> None:
    assert handshake.LIMIT_S < recovery.DIAL_S
    assert recovery.DIAL_S < recovery.SWITCH_S
    assert recovery.SWITCH_S + recovery.REBUDDY_S < mover.OBEY_S
    assert recovery.DIAL_S + recovery.PULL_S < mover.JOIN_S
