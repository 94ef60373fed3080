"""Who gives state to whom, and what a switch says of it."""

from collections.abc import Mapping

from tests.unit.planner_histories import submitted

from trainmover.schemas.commands import Answer, Pull, Stage
from trainmover.schemas.events import MigrationDecided, MigrationPlanned, Replacement
from trainmover.schemas.member import Member
from trainmover.schemas.shards import NOT_SAID, Shards
from trainmover.services.contract import Ask
from trainmover.services.mover.migration import MAX_DONORS, Migration
from trainmover.services.mover.verdict import verdict

DECIDED = MigrationDecided(job="j", run="r", generation=2, incident="g2", target=7)


def worker(rank: int) -> str:
    return f"w{rank}"


def migration(
    layout: str,
    joiners: Mapping[int, str],
    shards: Shards = NOT_SAID,
    leavers: tuple[int, ...] = (),
) -> Migration:
    """`joiners` are set up for these ranks; all others are clean, and keep everybody's extras."""
    spec = submitted(layout)
    members = tuple(
        Member(rank=r, worker=joiners.get(r, worker(r)), machine="m", addresses=())
        for r in range(spec.layout.world_size)
    )
    plan = MigrationPlanned(
        job="j",
        run="r",
        generation=2,
        incident="g2",
        kind="crash",
        replacements=tuple(
            Replacement(rank=r, leaver=worker(r), joiner=j) for r, j in joiners.items()
        ),
        members=members,
        leavers=tuple(Member(rank=r, worker=worker(r), machine="m", addresses=()) for r in leavers),
        reason="",
    )
    kept = {rank: (7,) for rank in range(len(members))}
    facts = {"about": 2, "promised": 2, "set_up": True, "committed": 7}
    answers = {
        m.worker: Answer.model_validate(
            {"worker": m.worker, "stage": Stage.OBEYED, **facts}
            if m.worker in joiners.values()
            else {
                **{"worker": m.worker, "stage": Stage.RESTORED, "empty": False, "extras": kept},
                **facts,
            }
        )
        for m in (*members, *plan.leavers)
    }
    return Migration(spec, plan, (), frozenset(), answers, shards=shards)


def pulls(found: Migration) -> dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]]:
    """Joiner -> objects and donors of each bundle."""
    asks = [out for out in found.tell_pull(DECIDED) if isinstance(out, Ask)]
    told = {ask.worker: ask.command for ask in asks if isinstance(ask.command, Pull)}
    for pull in told.values():
        assert pull.donor == pull.bundles[0].donors[0]
        assert pull.sources == pull.bundles
    return {
        joiner: [(b.objects, tuple(m.worker for m in b.donors)) for b in pull.bundles]
        for joiner, pull in told.items()
    }


def test_every_clean_replica_gives_a_stripe_and_joiners_begin_with_different_ones() -> None:
    assert pulls(migration("dp=5", {1: "x", 3: "y"})) == {
        "x": [((), ("w2", "w4", "w0"))],
        "y": [((), ("w0", "w2", "w4"))],
    }


def test_no_more_donors_are_named_than_help() -> None:
    (((_, donors),),) = pulls(migration("dp=32", {1: "x"})).values()
    assert len(donors) == MAX_DONORS


def test_who_moves_takes_everything_from_its_leaver() -> None:
    assert pulls(migration("dp=3", {1: "x"}, leavers=(1,))) == {"x": [((), ("w1",))]}


TWO_AXES = {
    rank: {"model": f"dp_shard={rank % 2}", "table": f"dp_replicate={rank // 2}"}
    for rank in range(4)
}
LAYOUT = "dp_replicate=2,dp_shard=2"


def test_objects_with_different_holders_come_in_bundles() -> None:
    found = migration(LAYOUT, {1: "x"}, TWO_AXES)
    assert pulls(found) == {"x": [(("model",), ("w3",)), (("table",), ("w0",))]}
    said = verdict(found.spec.layout, found.plan, found.answers, TWO_AXES)
    assert (said.problem, [source.donors for source in said.sources]) == ("", [("w0", "w3")])


def test_a_bundle_waits_until_each_object_has_a_clean_holder() -> None:
    found = migration(LAYOUT, {1: "x", 3: "y"}, TWO_AXES)
    assert pulls(found) == {}
    said = verdict(
        found.spec.layout,
        found.plan,
        {w: a.model_copy(update={"empty": w in "xy"}) for w, a in found.answers.items()},
        TWO_AXES,
    )
    assert said.state_lost
    assert "the shard of rank 1 (dp_shard=1: model)" in said.problem


def test_a_switch_says_how_much_came_from_each_donor() -> None:
    found = migration("dp=3", {1: "x"})
    gave = {"w2": 30, "w0": 12}
    pulled = found.answers["x"].model_copy(
        update={"donor": "w2", "donors": gave, "num_bytes": 42, "digest": "d", "donor_digest": "d"}
    )
    answers = {**found.answers, "x": pulled}
    done = Migration(found.spec, found.plan, (), frozenset(), answers)
    (one,) = done.switched(DECIDED).restored
    assert (one.donor, one.donors, one.num_bytes) == ("w2", gave, 42)
