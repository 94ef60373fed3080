"""`everything.py`, whose first joiner dies in the middle of its switch: it has dialed nobody."""

from everything import die_once, parse, train

import trainmover
from trainmover.runtime.links import Links
from trainmover.schemas.commands import Switch

switch = Links.switch


def dying(links: Links, command: Switch, rank: int, deadline_s: float) -> tuple[int, int, int]:
    if command.generation > 1 and rank in command.joiners:
        die_once(parse().folder / "died")
    return switch(links, command, rank, deadline_s)


Links.switch = dying  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    trainmover.run(train)
