"""The digest of a job's state, by which two runs are known to have come to the same bits."""

from collections.abc import Iterable
from hashlib import sha256


def of_job(ranks: Iterable[str]) -> str:
    """From the digests of all ranks, in rank order."""
    return sha256("\n".join(ranks).encode("ascii")).hexdigest()
