"""Which rows: decided by a hash of the row's id, so alike on every machine, in every order and for every seed."""

import hashlib


def row_hash(row_id: str, salt: str) -> int:
    """The first 64 bits of sha256(salt, row_id): uniform over [0, 2**64), independent between salts."""
    digest = hashlib.sha256(f"{salt}\0{row_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def in_fraction(row_id: str, fraction: float, salt: str) -> bool:
    """Whether the row belongs to the share `fraction` in [0, 1]; under one salt a larger share contains a smaller one.

    The kept sample is salt "sample", the held-out split of it salt "held_out". The id is `<file name>:<line>`, not the
    content: a renamed file is another draw.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction = {fraction!r} is not in [0, 1]")
    return row_hash(row_id, salt) < int(fraction * 2**64)
