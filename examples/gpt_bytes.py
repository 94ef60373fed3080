"""A small byte-level GPT on the source text of this machine's Python standard library.

    trainmover run --nproc-per-node 4 --standbys 1 examples/gpt_bytes.py --steps 60

DDP, AdamW, a warm-up schedule, dropout, a shuffled and sharded loader, gradient accumulation.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainmover

CONTEXT = 64  # bytes a sample


class Bytes(Dataset[tuple[Tensor, Tensor]]):
    """Windows of CONTEXT + 1 bytes; a sample is (input, next byte), both int64 of [CONTEXT]."""

    def __init__(self, limit: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[:limit]
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.data[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        b, length, width = x_BLD.shape
        qkv = self.qkv(self.before_attention(x_BLD)).view(b, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x_BLD = x_BLD + self.out(y.transpose(1, 2).reshape(b, length, width))
        return x_BLD + self.mlp(self.before_mlp(x_BLD))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, input_BL: Tensor, target_BL: Tensor) -> Tensor:
        x_BLD = self.bytes(input_BL) + self.positions.weight
        logits = self.head(self.blocks(x_BLD))
        return F.cross_entropy(logits.flatten(0, 1), target_BL.flatten())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="samples a rank and micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--text-bytes", type=int, default=2_000_000)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def train(ctx: trainmover.Context) -> None:
    args = parse()
    torch.manual_seed(args.seed)
    bare = Gpt(args.layers, args.width, heads=4, dropout=0.1)
    model = DistributedDataParallel(bare, process_group=ctx.group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 20))
    dataset = Bytes(args.text_bytes)
    sampler = DistributedSampler(dataset, ctx.size("dp"), ctx.coordinate("dp"), seed=args.seed)
    data = ctx.batches(
        lambda: DataLoader(
            dataset, args.batch, sampler=sampler, num_workers=args.loader_workers, drop_last=True
        )
    )
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler)
    # Dropout differs between the ranks; the weights above do not.
    torch.manual_seed(args.seed * 1000 + ctx.rank)

    for step in ctx.steps(args.steps):
        with step:
            total = 0.0
            for _ in range(args.micro_batches):
                loss = model(*next(data)) / args.micro_batches
                loss.backward()
                total += loss.item()
            step.report(loss=total, tokens=args.batch * args.micro_batches * CONTEXT)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    trainmover.run(train)
