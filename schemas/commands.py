"""What the mover asks of a runtime, and where the runtime says it is.

Commands are core NATS requests: complete in themselves, idempotent, accepted in any order and
any number of times. A runtime answers every one with the same `Answer`, after at most
`ANSWER_WITHIN_S`, and the mover repeats until the answer fits.
"""

from enum import IntEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter

from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member
from trainmover.schemas.names import Name

ANSWER_WITHIN_S = 1.0
"""A runtime that is still working on a command answers with where it is after this long."""


class Command(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


Tapes = dict[str, str]
"""Role class -> name of what was recorded for it."""


class StandBy(Command):
    """Warm up over shadow groups for one role class after the other, and park in the last until a
    plan names you. With other `tapes` than before: once more."""

    kind: Literal["stand-by"] = "stand-by"
    layout: Layout
    tapes: Tapes = Field(default_factory=dict)


class Prepare(Command):
    """A planned generation: a joiner runs `train` for its rank, parks, and opens its links ahead.

    Nothing of the running generation changes; `Drop` undoes it.
    """

    kind: Literal["prepare"] = "prepare"
    generation: Annotated[int, Field(ge=2)]
    layout: Layout
    members: tuple[Member, ...]
    placement: tuple[Name, ...]
    joiners: tuple[NonNegativeInt, ...]
    """Ranks that get another worker: they dial."""
    tapes: Tapes = Field(default_factory=dict)


class Freeze(Command):
    """Ask in the next vote that every rank stops at its boundary, for planned `generation`."""

    kind: Literal["freeze"] = "freeze"
    generation: Annotated[int, Field(ge=2)]


class Drop(Command):
    """Planned `generation` comes to nothing: go on in the one that runs."""

    kind: Literal["drop"] = "drop"
    generation: Annotated[int, Field(ge=2)]
    reason: str


class Collect(Command):
    """End the running generation, promise `generation`, and say where you are."""

    kind: Literal["collect"] = "collect"
    generation: Annotated[int, Field(ge=2)]
    assignment: str
    """Digest of the members of `generation`."""
    incident: str = ""
    """Whose trace this belongs to: the name of the interruption, as in `migration.planned`."""


class Decided(Command):
    """Be at `target` committed steps: drop the open step or commit the one you hold.

    A joiner runs `train` for its rank and parks. With `setup_again` everybody unwinds `train`.
    """

    kind: Literal["decided"] = "decided"
    generation: Annotated[int, Field(ge=2)]
    layout: Layout
    members: tuple[Member, ...]
    placement: tuple[Name, ...]
    """Machine of each rank in generation 1: the buddies follow from it for the whole job."""
    target: NonNegativeInt
    setup_again: bool = False
    tapes: Tapes = Field(default_factory=dict)
    """For joiners; in them a worker that never stood by finds its own."""


class Bundle(BaseModel):
    """Objects that come from the same donors, each of which holds all of them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    objects: tuple[str, ...] = ()
    """Tracked names; empty: everything."""
    donors: Annotated[tuple[Member, ...], Field(min_length=1)]


class Pull(Command):
    """Take the shared state, a stripe from each donor, and the own state from `extras_from`."""

    kind: Literal["pull"] = "pull"
    generation: Annotated[int, Field(ge=2)]
    target: NonNegativeInt
    donor: Member
    """The first of all donors; where there are no bundles it gives everything."""
    bundles: tuple[Bundle, ...] = ()
    extras_from: Member | None

    @property
    def sources(self) -> tuple[Bundle, ...]:
        """What comes from whom."""
        return self.bundles or (Bundle(donors=(self.donor,)),)


class Switch(Command):
    """Open the links of the joiners, renew the others, put extras at the buddies.

    With `setup` (generation 1, or after `setup_again`) no state exists yet: open the control
    links and run `train`, whose set-up communicates for real.
    """

    kind: Literal["switch"] = "switch"
    generation: PositiveInt
    layout: Layout
    members: tuple[Member, ...]
    placement: tuple[Name, ...]
    joiners: tuple[NonNegativeInt, ...]
    """Ranks whose worker was in no completed generation yet: they dial."""
    target: NonNegativeInt
    setup: bool


class Resume(Command):
    kind: Literal["resume"] = "resume"
    generation: Annotated[int, Field(ge=2)]
    target: NonNegativeInt
    total: NonNegativeInt | None = None
    """Updates of the loop where a member knows that it was stopped: who learnt of the commit from
    the decision did not see the vote's result, and so not its `stop`."""


class Retire(Command):
    """The job is over, or another worker has your rank: say goodbye and exit."""

    kind: Literal["retire"] = "retire"
    reason: str


AnyCommand = StandBy | Prepare | Freeze | Drop | Collect | Decided | Pull | Switch | Resume | Retire
COMMAND: TypeAdapter[AnyCommand] = TypeAdapter(Annotated[AnyCommand, Field(discriminator="kind")])


class Stage(IntEnum):
    """How far a runtime has come towards the generation that an answer is about."""

    NONE = 0
    COLLECTED = 1
    """Promised: nothing of an older generation counts any more."""
    OBEYED = 2
    """At the target, at a boundary; a joiner: `train` was run for its rank and is parked."""
    RESTORED = 3
    """Its state is that of the target (at once for who was clean)."""
    SWITCHED = 4
    """Links open, own extras at the buddies."""
    RESUMED = 5


Mark = Literal["frozen", "collected", "obeyed", "restored", "switched", "resumed", "first_step"]
"""The stages by name, before them the stop for a planned switch, after them the first committed
step, or the end of the loop."""


class Answer(BaseModel):
    """Where a runtime is. `about` is the generation asked for; the rest are facts of now."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    worker: Name
    about: NonNegativeInt = 0
    stage: Stage = Stage.NONE
    assignment: str = ""
    running: NonNegativeInt = 0
    """Generation it runs in, 0: none."""
    promised: NonNegativeInt = 0
    rank: NonNegativeInt | None = None
    empty: bool = True
    """Holds no state of the job: a standby."""
    set_up: bool = False
    """Its set-up and shadow steps are done for its rank."""
    committed: NonNegativeInt = 0
    holding: bool = False
    """Voted ok for step `committed` and does not know the result."""
    dirty: bool = False
    prepared: NonNegativeInt = 0
    """Planned generation that it is prepared for."""
    prepare_error: str = ""
    """Why it could not be."""
    frozen: NonNegativeInt = 0
    """Planned generation for which it stands at a boundary."""
    dropped: NonNegativeInt = 0
    """Highest planned generation that it was told comes to nothing."""
    done: bool = False
    """Its loop is over: it has committed every step."""
    total: NonNegativeInt | None = None
    """Updates of its loop, less after a `stop` that it knows of; None before the loop."""
    extras: dict[int, tuple[int, ...]] = Field(default_factory=dict)
    """Rank -> versions of that rank's extras kept here."""
    donor: Name | None = None
    donors: dict[Name, NonNegativeInt] = Field(default_factory=dict)
    """Worker -> bytes of shared state that came from it; some gave none, but their digest."""
    donor_digest: str = ""
    digest: str = ""
    num_bytes: NonNegativeInt = 0
    pull_s: Annotated[float, Field(ge=0)] = 0.0
    links: tuple[int, int, int] = (0, 0, 0)
    """Opened, closed and kept in the last switch."""
    reached: dict[Mark, float] = Field(default_factory=dict)
    """What of a migration was reached when, seconds since 1970 by the worker's clock."""
    normal_step_s: Annotated[float, Field(ge=0)] | None = None
    """Median duration of the steps before the collect; None: it has committed too few."""
    refused: str = ""
    """Why the command was not obeyed; empty when it was."""
