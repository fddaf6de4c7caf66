"""What training changed in who influences the routers: two runs of the lens on the same texts."""

import numpy as np
import pandas as pd

from aarlib.studies.lens_samples import Array, Resampled, Senders, resampled, row_of, senders_of


def before_and_after(before: pd.DataFrame, after: pd.DataFrame, source: str) -> pd.DataFrame:
    """Each sender's share of a receiver's summed variance, before and after training.

    Raises ValueError where the two runs have other receivers, documents or tokens.
    """
    sides = [senders_of(records, source, "layer") for records in (before, after)]
    _check_same_texts(sides[0], sides[1], source)
    names = list(dict.fromkeys(name for side in sides for name in side.senders))
    rows = []
    for column, receiver in enumerate(sides[0].receivers):
        for name in names:
            values = [_share_columns(side, name, column) for side in sides]
            table: Resampled = resampled(np.concatenate(values, axis=1))
            if not (table.total[[0, 2]] > 0).any():
                continue
            found = table.interval(lambda s: s[..., 2] / s[..., 3] - s[..., 0] / s[..., 1])
            row = row_of(found, receiver=receiver, sender=name)
            row["before"], row["after"] = table.total[0] / table.total[1], table.total[2] / table.total[3]
            rows.append(row)
    return pd.DataFrame(rows)


def _check_same_texts(before: Senders, after: Senders, source: str) -> None:
    remedy = "decompose the same texts with the same receivers before and after"
    if before.receivers != after.receivers:
        raise ValueError(f"before: its receivers are {before.receivers}, now {after.receivers}; {remedy}")
    if others := set(before.samples) ^ set(after.samples):
        raise ValueError(
            f"before: source {source!r} has {len(before.samples)} documents, now {len(after.samples)}, and "
            f"{len(others)} are not in both, such as {min(others)!r}; {remedy}"
        )
    if (changed := before.tokens != after.tokens).any():
        raise ValueError(
            f"before: document {before.samples[int(changed.argmax())]!r} of source {source!r} has another number of "
            f"tokens now; {remedy}"
        )


def _share_columns(side: Senders, name: str, column: int) -> Array:
    total = side.sums["variance"][:, :, column].sum(1)
    own = side.sums["variance"][:, side.senders.index(name), column] if name in side.senders else np.zeros_like(total)
    return np.stack([own, total], axis=1)
