"""One whole trace for each incident of a real job, whoever of those that write it is killed."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.job import Job, child
from trainmover.schemas.trace import ROOT, trace_id

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(120)]

Line = dict[str, Any]
PHASES = {"detect": "detector", "plan": "planner"} | dict.fromkeys(
    ("collect", "move", "resume"), "mover"
)
PIECES = ("obey", "switch", "resume", "first step")
MOMENTS = ("worker.exited", "migration.planned", "migration.decided", "migration.completed")


def recover(run: Job, rank: int, allowed: int, victim: str, moment: str, after_s: float) -> None:
    """Kills a rank, and a service a little after an event of the recovery was seen."""
    count = len(run.of("migration.completed")) + 1
    seen = len(run.of(moment)) + 1
    run.wait_for("a parked standby", lambda: bool(run.parked()))
    run.inject(f"kill:worker={run.assignment()[rank]},at=backward")
    run.pace(allowed)
    if victim:
        run.wait_for(moment, lambda: run.happened(moment, seen))
        time.sleep(after_s)  # the moment is the subject of this test
        os.kill(child(run.process.pid, f"trainmover.services.{victim}"), signal.SIGKILL)
    run.recovered(count)


def check(folder: Path, kills: Sequence[tuple[str, str, float]]) -> None:
    """A job with one recovery for each of `kills` leaves one whole trace for each."""
    steps = 2 * len(kills) + 6
    arguments = (f"--steps={steps}", f"--folder={folder}", "--micro-batches=2")
    flags = (f"--trace-dir={folder / 'traces'}", "--machine=m")
    with Job(folder, "everything.py", script_args=arguments, run_args=flags) as run:
        run.pace(1)
        for n, kill in enumerate(kills):
            recover(run, n % 2, 2 * n + 3, *kill)
        run.pace(steps + 1)
        finished = run.finish()
    assert finished.code == 0, finished.output[-6000:]
    assert "service is started again" in finished.output
    traces = read(folder / "traces")
    told = {incident["incident"]: incident for incident in finished.report["incidents"]}
    last = {plan["incident"]: plan for plan in run.of("migration.planned")}
    assert len(last) == len(kills)
    assert traces.keys() == {"0x" + trace_id(plan["run"], name) for name, plan in last.items()}
    for incident, plan in last.items():
        spans = traces["0x" + trace_id(plan["run"], incident)]
        assert_whole(spans)
        assert_one_chain(spans)
        assert_the_report_tells_the_same(spans, told[incident])
        assert_everybody_wrote_his_own(spans, plan, run.of("worker.failed"))


def test_each_incident_is_one_trace_without_orphan_or_gap_although_the_mover_is_killed(
    tmp_path: Path,
) -> None:
    check(tmp_path, [("", "worker.failed", 0.0), ("mover", "migration.planned", 0.0)])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["detector", "planner", "mover"])
def test_no_span_is_missing_whenever_a_service_is_killed(tmp_path: Path, victim: str) -> None:
    draw = random.Random(victim)
    check(tmp_path, [(victim, draw.choice(MOMENTS), draw.uniform(0, 0.1)) for _ in range(8)])


def read(folder: Path) -> dict[str, dict[str, Line]]:
    """Trace id -> name -> span, with the file that it stands in as `by`.

    A span that was written twice, by the killed mover and by its successor, says the same but for
    the process's own id.
    """
    found: dict[str, dict[str, Line]] = {}
    for path in folder.glob("*.jsonl"):
        for text in path.read_text().splitlines():
            line = {**json.loads(text), "by": path.stem}
            del line["resource"]["attributes"]["service.instance.id"]
            spans = found.setdefault(line["context"]["trace_id"], {})
            assert spans.setdefault(line["name"], line) == line
    return found


def parent_of(name: str, spans: dict[str, Line]) -> str:
    if piece := re.fullmatch(r"(rank \d+): .* (g\d+)", name):
        return f"{piece[1]} {piece[2]}"
    detect = [other for other in spans if other.startswith("detect ")]
    return detect[0] if name.startswith("exit ") and detect else ROOT


def assert_whole(spans: dict[str, Line]) -> None:
    """One root, and each other span within it and below the right parent."""
    assert [name for name, span in spans.items() if span["parent_id"] is None] == [ROOT]
    ids = {span["context"]["span_id"] for span in spans.values()}
    assert len(ids) == len(spans)
    for name, span in spans.items():
        assert span["start_time"] <= span["end_time"]
        if name != ROOT:
            parent = spans[parent_of(name, spans)]
            assert span["parent_id"] == parent["context"]["span_id"], name
            assert spans[ROOT]["start_time"] <= span["start_time"], name
            assert span["end_time"] <= spans[ROOT]["end_time"], name


def assert_one_chain(spans: dict[str, Line]) -> None:
    """Each phase begins when the one before it ends, from the root's start to its end."""
    chain = sorted(
        (span for name, span in spans.items() if name.partition(" ")[0] in PHASES),
        key=lambda span: (span["start_time"], span["end_time"]),
    )
    times = [time for span in chain for time in (span["start_time"], span["end_time"])]
    assert (times[0], times[-1]) == (spans[ROOT]["start_time"], spans[ROOT]["end_time"])
    assert times[1:-1:2] == times[2:-1:2]


def assert_the_report_tells_the_same(spans: dict[str, Line], told: dict[str, Any]) -> None:
    """Two readers of one stream: of the spans' root, and of the report."""
    root = spans[ROOT]
    start, end = (datetime.fromisoformat(root[at]).timestamp() for at in ("start_time", "end_time"))
    assert start == pytest.approx(told["t0"], abs=1e-4)
    assert end - start == pytest.approx(told["first_step_s"], abs=1e-4)
    assert root["attributes"]["trainmover.lost_steps"] == told["lost_steps"]
    assert root["attributes"]["trainmover.kind"] == told["kind"]


def assert_everybody_wrote_his_own(
    spans: dict[str, Line], plan: dict[str, Any], failures: list[dict[str, Any]]
) -> None:
    """`plan`: the last of the incident. One that came to nothing before it left spans as well."""
    generation, (replacement,) = plan["generation"], plan["replacements"]
    leaver, detected = replacement["leaver"], [n for n in spans if n.startswith("detect ")]
    before = [e for e in failures if leaver in e["workers"] and e["seq"] < plan["seq"]]
    assert len(detected) == len(before)  # none if it was replaced for its silence
    expected = {ROOT: "mover", f"exit {leaver}": "agent-m", **dict.fromkeys(detected, "detector")}
    phases = [phase for phase in PHASES if phase != "detect"]
    expected |= {f"{phase} g{generation}": PHASES[phase] for phase in phases}
    for member in plan["members"]:
        rank, worker = member["rank"], member["worker"]
        joined = worker == replacement["joiner"]
        pieces = (*PIECES, "pull") if joined else PIECES
        names = [f"rank {rank} g{generation}"]
        names += [f"rank {rank}: {piece} g{generation}" for piece in pieces]
        expected |= dict.fromkeys(names, worker)
    assert {name: spans[name]["by"] for name in expected} == expected
    assert not [name for name in expected if spans[name]["status"]["status_code"] != "UNSET"]
    pulled = spans[f"rank {replacement['rank']}: pull g{generation}"]["attributes"]
    assert pulled["trainmover.bytes"] > 0
    assert pulled["trainmover.donor"] in {member["worker"] for member in plan["members"]}
