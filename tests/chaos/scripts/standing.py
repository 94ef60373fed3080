"""Data parallel by hand; what a standby meets before it is warm is chosen by `--standby`."""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from driven import wait_for_pace
from torch import nn

import trainmover
from trainmover.runtime import warming
from trainmover.runtime.tape import Tape
from trainmover.runtime.tapes import Tapes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument(
        "--standby", choices=("fits", "differs", "waits", "raises", "hangs"), default="fits"
    )
    parser.add_argument("--foreign", action="store_true", help="tapes are of another script")
    return parser.parse_args()


def meet(what: str, folder: Path) -> None:
    """Only on a standby: nobody recorded this."""
    match what:
        case "differs":
            dist.all_reduce(torch.zeros(3, dtype=torch.int64))
        case "waits":
            while (folder / "hold").exists():
                time.sleep(0.005)
        case "raises":
            raise RuntimeError("a standby cannot do this")
        case "hangs":
            time.sleep(600)


def rows_of(folder: Path) -> int:
    """Of a batch, as the file says now; without it 8."""
    path = folder / "rows"
    return int(path.read_text()) if path.exists() else 8


def stored_as_foreign(self: Tapes, tape: Tape) -> str:
    """In the place of `Tapes.put`: as if another script had recorded it."""
    return stored(self, replace(tape, key=replace(tape.key, script="0" * 64)))


stored = Tapes.put


def train(ctx: trainmover.Context) -> None:
    args = parse()
    if ctx.shadow:
        meet(args.standby, args.folder)
    rows = rows_of(args.folder)
    torch.manual_seed(3)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(args.steps):
        wait_for_pace(ctx, step, args.folder / "pace")
        with step:
            torch.manual_seed(1000 * step.number + ctx.rank)
            outputs = model(torch.randn(rows, 6))
            dist.all_gather([torch.empty_like(outputs) for _ in range(2)], outputs.detach())
            loss = outputs.square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            step.report(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    warming.WARM_S = 1.0 if parse().standby == "hangs" else warming.WARM_S
    if parse().foreign:
        Tapes.put = stored_as_foreign  # type: ignore[method-assign]
    trainmover.run(train, role_class=lambda rank, layout: "even" if rank % 2 == 0 else "odd")
