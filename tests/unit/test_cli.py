"""Flags, sessions and submissions: what a user types, and what is answered."""

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmover.agent.orders import Program
from trainmover.bus.nats import without_secrets
from trainmover.cli import reach, session, submission
from trainmover.cli.main import parser
from trainmover.cli.options import RunOptions, WrongUsage, as_name, read, secret_in_hex, warnings
from trainmover.cli.submission import Past, Refused, admitted
from trainmover.cli.view import in_lines, view
from trainmover.cli.words import code_in_words, in_words
from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    Exit,
    InterruptionAnnounced,
    JobCompleted,
    JobSubmitted,
    LayoutAssigned,
    MigrationAborted,
    MigrationDecided,
    MigrationPlanned,
    WorkerExited,
    WorkerStarted,
)
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded

SECRET = "ab" * 32


def options(*argv: str) -> RunOptions:
    return read(parser().parse_args(["run", *argv]), SECRET)


def test_flags_are_spelled_with_dashes_or_underscores() -> None:
    dashes = options("--nproc-per-node", "2", "--num-threads=3", "train.py")
    underscores = options("--nproc_per_node", "2", "--num_threads=3", "train.py")
    assert (dashes.workers_per_machine, dashes.num_threads) == (2, 3)
    assert (underscores.workers_per_machine, underscores.num_threads) == (2, 3)


def test_what_follows_the_script_belongs_to_the_script() -> None:
    program = options("train.py", "--nproc_per_node", "9", "-m", "--", "x").program
    assert program.script == "train.py"
    assert program.arguments[:3] == ("--nproc_per_node", "9", "-m")
    assert not program.module


def test_a_module_is_run_with_m() -> None:
    program = options("-m", "pkg.train", "--lr", "1").program
    assert (program.module, program.argv) == (True, ("-m", "pkg.train", "--lr", "1"))


def test_every_flag_is_an_environment_variable_and_the_flag_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINMOVER_NPROC_PER_NODE", "4")
    monkeypatch.setenv("TRAINMOVER_FAULT", "kill:rank=0,step=1;kill:rank=1,step=2")
    assert options("train.py").workers_per_machine == 4
    assert len(options("train.py").faults) == 2
    assert options("--nproc-per-node", "2", "train.py").workers_per_machine == 2


def test_a_variable_that_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINMOVER_STANDBYS", "some")
    with pytest.raises(SystemExit) as end:
        options("train.py")
    assert end.value.code == 2
    assert "TRAINMOVER_STANDBYS=some" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--max-restarts=3", "--max-failures"),
        ("--max_restarts", "--max-failures"),
        ("--rdzv-endpoint=host:1", "--bus"),
        ("--rdzv_id=7", "--job"),
        ("--node-rank=0", "--machine"),
        ("--standalone", "without --bus"),
    ],
)
def test_a_flag_of_torchrun_that_does_not_exist_says_what_replaces_it(
    flag: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        options(flag, "train.py")
    assert end.value.code == 2
    assert instead in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (("run", "--standby", "2", "train.py"), "did you mean --standbys?"),
        (("run", "--nproc_per_nod=2", "train.py"), "did you mean --nproc_per_node?"),
        (("inject", "kill", "--rank", "1", "--jop=j"), "did you mean --job?"),
        (("status", "--xyzzy"), "no flag --xyzzy here"),
    ],
)
def test_a_mistyped_flag_is_answered_with_the_nearest_and_the_usage_of_its_command(
    argv: tuple[str, ...], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(argv)
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.startswith(f"usage: trainmover {argv[0]} ")
    assert said.rstrip().endswith(answer)


def test_a_layout_that_does_not_fit_the_ranks_is_refused_with_both_numbers() -> None:
    with pytest.raises(WrongUsage, match=r"has 8 ranks.*makes 4"):
        options("--nproc-per-node", "4", "--layout", "pp=2,dp=4", "train.py")
    with pytest.raises(WrongUsage, match="pp=2,dp=4"):
        options("--layout", "dp:4", "train.py")


def test_without_a_layout_every_rank_is_a_replica() -> None:
    assert str(options("--nproc-per-node", "3", "train.py").layout) == "dp=3"


def test_several_machines_need_a_bus_and_a_bus_needs_a_name() -> None:
    with pytest.raises(WrongUsage, match="--bus"):
        options("--nnodes", "2", "train.py")
    with pytest.raises(WrongUsage, match="--job"):
        options("--bus", "nats://h:1", "train.py")


@pytest.mark.parametrize(
    "fault", ["kill", "kill:rank=1", "melt:rank=1,step=2", "kill:rank=1,step=2,who=me"]
)
def test_a_fault_that_is_none_is_refused_with_the_form(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options("--fault", fault, "train.py")
    assert "KIND:rank=R,step=S" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["kill:rank=2,step=5", "kill:rank=-1,step=5"])
def test_a_fault_of_a_rank_that_the_layout_lacks_is_refused(fault: str) -> None:
    with pytest.raises(WrongUsage, match=r"layout dp=2 has ranks 0\.\.1, got rank"):
        options("--nproc-per-node", "2", "--fault", fault, "train.py")


def test_a_fault_in_a_step_before_the_first_is_refused() -> None:
    with pytest.raises(WrongUsage, match="got -1"):
        options("--fault", "kill:rank=0,step=-1", "train.py")


def test_faults_that_are_read_from_a_file_later_or_name_a_worker_are_taken() -> None:
    assert len(options("--fault", "@f", "--fault", "kill:worker=m-w7", "train.py").faults) == 2


def test_a_job_without_replicas_is_warned_of_what_a_death_means() -> None:
    (warning,) = warnings(options("--nproc-per-node", "2", "--layout", "dp=1,tp=2", "train.py"))
    assert "exit code 4" in warning
    assert warnings(options("--nproc-per-node", "4", "--layout", "pp=2,dp=2", "train.py")) == []


def test_several_machines_are_warned_of_a_missing_secret_and_of_a_loopback_address() -> None:
    argv = ("run", "--bus", "nats://h:1", "--job", "j", "--nnodes", "2")
    unset = warnings(read(parser().parse_args([*argv, "train.py"]), None))
    assert ["TRAINMOVER_SECRET" in unset[0], "--host 127.0.0.1" in unset[1]] == [True, True]
    assert warnings(read(parser().parse_args([*argv, "--host=10.0.0.1", "train.py"]), SECRET)) == []


@pytest.mark.parametrize("text", ["no hex", "abc", "AB", "ab\n"])
def test_a_secret_that_is_no_hex_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(WrongUsage, match="hex digits") as refused:
        secret_in_hex(text)
    assert text not in str(refused.value)


@pytest.mark.parametrize(
    "command", [("status",), ("events",), ("inject", "kill", "--rank=0"), ("services",)]
)
def test_every_command_that_reads_the_secret_refuses_one_that_is_no_hex(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINMOVER_SECRET", "zz")
    args = parser().parse_args([*command, "--bus", "nats://127.0.0.1:1", "--job", "j"])
    with pytest.raises(WrongUsage, match="TRAINMOVER_SECRET"):
        args.command(args)


def test_a_job_of_another_secret_is_not_taken_for_none() -> None:
    with pytest.raises(WrongUsage, match="signed with another secret"):
        reach.readable(Past(num_foreign=3), "j")
    assert reach.readable(Past(), "j") == Past()


def test_a_token_is_not_shown() -> None:
    assert without_secrets("nats://token@h:1") == "nats://h:1"
    assert without_secrets("token@h:1") == "nats://h:1"


def test_a_secret_is_made_where_the_bus_is_ours_and_never_shown() -> None:
    made = read(parser().parse_args(["run", "train.py"]), None)
    assert len(bytes.fromhex(made.secret)) == 32
    assert made.secret not in repr(made)


@given(st.text())
def test_any_host_name_gives_a_machine_name(text: str) -> None:
    Member(rank=0, worker=as_name(text), machine=as_name(text), addresses=())


def test_signals_are_named() -> None:
    assert code_in_words(-9) == "killed by SIGKILL"
    assert code_in_words(1) == "exit code 1"


def test_what_would_steer_a_terminal_is_shown() -> None:
    text = "red \x1b[31m\rback\x9bx, two\nlines"
    event = InterruptionAnnounced(
        job="j", run="r1", interruption="m", kind="rebalance", workers=("w",), reason=text
    )
    assert in_words(event) == "rebalance of w: red \\x1b[31m\\x0dback\\x9bx, two\nlines"


# ---- session


def own_session(directory: Path, *, job: str = "j", pid: int | None = None) -> session.Session:
    return session.Session(
        url="nats://token@127.0.0.1:1",
        secret=SECRET,
        job=job,
        run="r1",
        pid=pid or os.getpid(),
        directory=str(directory),
    )


@pytest.fixture
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path


def test_a_session_file_is_for_its_user_only(runtime_dir: Path) -> None:
    path = session.write(own_session(runtime_dir / "d"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert json.loads(path.read_text())["secret"] == SECRET


def test_a_session_whose_process_is_gone_is_removed_with_its_folder(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = runtime_dir / "left"
    left.mkdir()
    path = session.write(own_session(left, pid=2**22))  # above the kernel's largest pid
    assert session.live() == {}
    assert not path.exists()
    assert not left.exists()


def test_a_pid_that_another_program_has_now_is_no_session(runtime_dir: Path) -> None:
    session.write(own_session(runtime_dir / "d", pid=1))
    assert session.live() == {}


# ---- submission

LAYOUT = Layout.parse("dp=2")


def submitted(run: str = "r1", digest: str = "d" * 64) -> JobSubmitted:
    return JobSubmitted(
        job="j",
        run=run,
        layout=LAYOUT,
        workers_per_machine=2,
        num_standbys=1,
        script_digest=digest,
        host="h1",
    )


def started(machine: str, number: int = 0, run: str = "r1") -> WorkerStarted:
    worker = f"{machine}-w{number}"
    return WorkerStarted(
        job="j", run=run, worker=worker, machine=machine, local_index=number, pid=70 + number
    )


def past(*events: JobSubmitted | JobCompleted | WorkerStarted | WorkerExited) -> Past:
    return Past(tuple(Recorded(i, 1e9 + i, e) for i, e in enumerate(events, start=1)))


def test_the_first_to_submit_wins_and_the_same_program_joins_it() -> None:
    assert admitted(Past(), submitted("r2")) is None
    assert admitted(past(submitted("r1")), submitted("r2")) == "r1"


def test_another_program_is_refused_and_both_digests_are_named() -> None:
    with pytest.raises(Refused, match=r"d{16}.*e{16}") as refused:
        admitted(past(submitted()), submitted("r2", "e" * 64))
    assert "h1" in str(refused.value)


def test_a_job_that_ended_is_refused() -> None:
    end = JobCompleted(job="j", run="r1", completed_steps=3, state_digest="0")
    with pytest.raises(Refused, match="use another --job name"):
        admitted(past(submitted(), end), submitted("r2"))


def test_one_machine_more_joins_and_is_told_that_its_workers_stand_by() -> None:
    held = past(submitted(), started("m1"))
    assert admitted(held, submitted("r2")) == "r1"
    assert submission.surplus(held, "m2", 2) == submission.surplus(held, "m1", 1) == ""
    said = submission.surplus(held, "m2", 1)
    assert said.startswith("the job (submitted from h1 at ")
    assert "has its 1 machines (m1): all workers of this one stand by" in said


def test_a_machine_whose_agent_died_may_come_back() -> None:
    assert admitted(past(submitted(), started("m1")), submitted("r2")) == "r1"


def test_a_stream_signed_with_another_secret_is_not_taken_for_an_empty_one() -> None:
    with pytest.raises(Refused, match="TRAINMOVER_SECRET"):
        admitted(Past(num_foreign=3), submitted())


def test_workers_of_an_earlier_agent_without_an_end_are_lost() -> None:
    gone = WorkerExited(job="j", run="r1", machine="m1", exits=(Exit(worker="m1-w0", code=0),))
    records = past(started("m1", 0), started("m1", 1), started("m2", 0), gone).records
    assert submission.workers_of(records, "m1") == (["m1-w0", "m1-w1"], ["m1-w1"])


def test_the_digest_knows_script_arguments_and_layout(tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text("x = 1\n")
    plain = submission.digest(Program(script=str(script)), LAYOUT)
    assert plain != submission.digest(Program(script=str(script), arguments=("1",)), LAYOUT)
    assert plain != submission.digest(Program(script=str(script)), Layout.parse("dp=3"))
    script.write_text("x = 2\n")
    assert plain != submission.digest(Program(script=str(script)), LAYOUT)


def test_a_missing_script_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no script"):
        submission.digest(Program(script=str(tmp_path / "none.py")), LAYOUT)
    with pytest.raises(FileNotFoundError, match="no module"):
        submission.digest(Program(script="no.such.module", module=True), LAYOUT)


# ---- status


def member(rank: int, worker: str) -> Member:
    return Member(rank=rank, worker=worker, machine="m1", addresses=())


def test_the_newest_assignment_says_who_holds_a_rank() -> None:
    events = (
        submitted(),
        *(started("m1", n) for n in range(3)),
        LayoutAssigned(job="j", run="r1", members=(member(0, "m1-w0"), member(1, "m1-w1"))),
        WorkerExited(job="j", run="r1", machine="m1", exits=(Exit(worker="m1-w1", code=-9),)),
        MigrationPlanned(
            job="j",
            run="r1",
            generation=2,
            incident="g2",
            kind="crash",
            replacements=(),
            members=(member(0, "m1-w0"), member(1, "m1-w2")),
            reason="",
        ),
    )
    now = view([Recorded(i, 0.0, e) for i, e in enumerate(events, start=1)])
    assert now.generation == 2
    assert now.worker_of(1) == "m1-w2"
    assert "m1-w1" not in now.machines
    with pytest.raises(ValueError, match="no rank 2"):
        now.worker_of(2)
    assert "  rank 1    m1-w2 on m1, pid 72" in in_lines(now)


def test_before_ranks_are_assigned_none_of_them_can_be_named() -> None:
    now = view([Recorded(1, 0.0, submitted()), Recorded(2, 0.0, started("m1"))])
    with pytest.raises(ValueError, match="no rank 1 yet: ranks are not assigned"):
        now.worker_of(1)


def test_a_planned_switch_is_in_force_once_it_is_decided_and_not_if_it_was_dropped_first() -> None:
    move = MigrationPlanned(
        job="j",
        run="r1",
        generation=2,
        incident="g2",
        kind="planned",
        replacements=(),
        members=(member(0, "m1-w0"), member(1, "m1-w2")),
        leavers=(member(1, "m1-w1"),),
        reason="",
    )
    base = (
        submitted(),
        *(started("m1", n) for n in range(4)),
        LayoutAssigned(job="j", run="r1", members=(member(0, "m1-w0"), member(1, "m1-w1"))),
        move,
    )
    decided = MigrationDecided(job="j", run="r1", generation=2, incident="g2", target=7)
    aborted = MigrationAborted(job="j", run="r1", generation=2, incident="g2", reason="too late")

    def holder(*events: Event) -> tuple[int, str]:
        now = view([Recorded(i, 0.0, e) for i, e in enumerate((*base, *events), start=1)])
        return now.generation, now.worker_of(1)

    assert holder() == holder(aborted) == (1, "m1-w1")
    assert holder(decided) == holder(decided, aborted) == (2, "m1-w2")
    assert holder(aborted, decided) == (1, "m1-w1")  # of a doubled mover
    now = view([Recorded(i, 0.0, e) for i, e in enumerate((*base, decided), start=1)])
    # and not the leaver, which ends
    assert "  standbys  m1-w3 (warming up, pid 73)" in in_lines(now)


@pytest.mark.parametrize(
    ("flag", "what"),
    [("--report", "a folder"), ("--trace-dir", "a file"), ("--log-dir", "a file")],
)
@pytest.mark.parametrize("flags_of", [("run", "train.py")])
def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(
    flag: str,
    what: str,
    flags_of: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "file"
    file.touch()
    wrong = tmp_path if flag == "--report" else file
    command, script = flags_of
    for place in (wrong, file / "below"):
        with pytest.raises(SystemExit) as end:
            parser().parse_args([command, flag, str(place), script])
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert flag in said
        assert what in said or "is a file" in said


def test_flags_after_the_script_are_the_scripts_and_it_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = parser().parse_args(["run", "train.py", "--standbys", "2", "--report=x", "--lr", "1"])
    assert (args.standbys, args.report) == (1, None)
    assert args.arguments == ["--standbys", "2", "--report=x", "--lr", "1"]
    assert "note: --standbys, --report after the script" in capsys.readouterr().err
    parser().parse_args(["run", "--standbys", "2", "train.py", "--lr", "1"])
    assert capsys.readouterr().err == ""
