"""The report of an incident says how a worker came to its rank."""

import pytest
from tests.unit.incident_streams import CRASH, EPOCH, JOB

from trainmover.cli.incidents import incidents
from trainmover.cli.timeline import story
from trainmover.cli.words import in_words
from trainmover.schemas.events import RankReady, StandbyMismatched, StandbyWarmed
from trainmover.schemas.recorded import Recorded


def ready(bound: str, generation: int = 2) -> Recorded:
    event = RankReady.model_validate(
        {
            **JOB,
            "worker": "m-w9",
            "rank": 1,
            "generation": generation,
            "shards": {},
            "setup_s": 0.25,
            "bound": bound,
        }
    )
    return Recorded(len(CRASH) + 1, EPOCH + 0.7, event)


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ("again", "rank 1 (m-w9) ran train within 250 ms; rank 1 took 5.2 MB"),
        ("rebound", "rank 1 (m-w9) went on with its parked call within 250 ms; rank 1 took"),
    ],
)
def test_how_a_joiner_came_to_its_rank_stands_in_the_story(bound: str, words: str) -> None:
    (incident,) = incidents([*CRASH, ready(bound)])
    (promotion,) = incident.migrations[-1].promotions
    assert (promotion.rank, promotion.bound, promotion.setup_s) == (1, bound, 0.25)
    assert words in " ".join(story(incident, 100).split())


def test_who_is_ready_in_another_generation_is_no_part_of_it() -> None:
    (incident,) = incidents([*CRASH, ready("again", generation=1)])
    assert incident.migrations[-1].promotions == ()


def test_what_a_standby_is_warm_for_is_said_in_words() -> None:
    warm = StandbyWarmed(
        **JOB, worker="w9", rank=3, warm_s=2.5, role_class="middle", tape="t", replayed=True
    )
    assert in_words(warm) == "w9 is warm for middle by its tape after 2.5 s and stays"
    first = warm.model_copy(update={"role_class": "first", "replayed": False, "resident": False})
    assert in_words(first) == "w9 is warm for first by itself after 2.5 s"
    cold = StandbyMismatched(
        **JOB, worker="w9", rank=3, role_class="last", tape="t", reason="group 0: expected send"
    )
    assert in_words(cold) == "w9 is cold for last: group 0: expected send"
