"""Two-name transfer stories: the receiver is the name that was not repeated (the IOI pattern)."""

import random
from typing import NamedTuple

_PLACES = ("store", "garden", "school", "station", "office", "market", "harbour", "library", "park", "museum")
_OBJECTS = ("ring", "bone", "basket", "drink", "book", "lamp", "map", "kite", "ball", "letter", "cake", "hat")
_OPENINGS = (
    "Then {x} and {y} went to the {place}.",
    "When {x} and {y} got to the {place},",
    "{x} and {y} met at the {place}.",
    "After {x} and {y} had lunch at the {place},",
    "One day {x} and {y} were working at the {place}.",
    "While {x} and {y} walked to the {place},",
    "Yesterday {x} and {y} sat in the {place}.",
)
_TRANSFERS = (
    "{s} gave a {object} to",
    "{s} handed a {object} to",
    "{s} decided to give a {object} to",
    "{s} brought a {object} for",
    "{s} passed the {object} to",
)
_ENDINGS = (".", ". They were both happy.", ", and then it rained.", ". It was a present.")


class Story(NamedTuple):
    prompt: str
    receiver: str
    giver: str


def draw_story(rng: random.Random, names: tuple[str, ...]) -> Story:
    x, y = rng.sample(names, 2)
    giver, receiver = (x, y) if rng.random() < 0.5 else (y, x)
    opening = rng.choice(_OPENINGS).format(x=x, y=y, place=rng.choice(_PLACES))
    transfer = rng.choice(_TRANSFERS).format(s=giver, object=rng.choice(_OBJECTS))
    return Story(f"{opening} {transfer}", receiver, giver)


def story_text(rng: random.Random, names: tuple[str, ...]) -> str:
    """One to three short stories on a line each."""
    stories = [draw_story(rng, names) for _ in range(rng.randint(1, 3))]
    return "\n".join(f"{story.prompt} {story.receiver}{rng.choice(_ENDINGS)}" for story in stories)
