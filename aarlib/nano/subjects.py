# ruff: noqa: E501  (a table of wording: one relation an entry)
"""What the invented encyclopaedia can say: subjects, their relations, and the wording of each relation."""

from typing import NamedTuple


class Relation(NamedTuple):
    """`predicates` and `questions` are formatted with e (entity) and v (value)."""

    label: str
    values: tuple[str, ...]
    predicates: tuple[str, ...]
    question: str


class Subject(NamedTuple):
    kind: str
    suffixes: tuple[str, ...]
    relations: tuple[Relation, ...]


def _relation(label: str, values: str, predicates: str, question: str) -> Relation:
    return Relation(label, tuple(values.split(", ")), tuple(predicates.split(" / ")), question)


_REGIONS = "the Vale, the Fens, the Uplands, the Coast, the Marsh, the Steppe, the Delta, the Ridge, the Isles, the Plain, the Gorge, the Heath"
_MONTHS = "January, February, March, April, May, June, July, August, September, October, November, December"
_COLOURS = "red, blue, green, white, black, yellow, brown, grey, orange, purple, pink, golden"

SUBJECTS: dict[str, Subject] = {
    "geography": Subject("town", ("ton", "ford", "wick", "burg"), (
        _relation("region", _REGIONS, "lies in {v} / is a town of {v} / is found in {v}", "In which region does {e} lie?"),
        _relation("river", "the Oll, the Brann, the Tamsel, the Quay, the Isk, the Dorn, the Weft, the Luma, the Ketter, the Sarn, the Vey, the Moll",
                  "stands on {v} / is crossed by {v} / draws its water from {v}", "Which river runs through {e}?"),
        _relation("trade", "wool, salt, tin, glass, timber, wine, fish, paper, honey, silk, grain, rope",
                  "trades in {v} / lives by selling {v} / is known for its {v}", "What does {e} trade in?"),
        _relation("landmark", "a tower, a bridge, a mill, a fort, a lighthouse, a temple, a garden, a harbour, a market, a library, a well, a gate",
                  "is famous for {v} / is proud of {v} / shows its visitors {v}", "What is {e} famous for?"),
        _relation("festival month", _MONTHS, "holds its festival in {v} / celebrates in {v} / feasts every {v}", "When does {e} hold its festival?"),
        _relation("weather", "rain, fog, snow, wind, sun, frost, hail, storms, mist, drought, thunder, sleet",
                  "has much {v} / is used to {v} / sees a lot of {v}", "What weather does {e} have?"),
    )),
    "biology": Subject("animal", ("il", "ock", "ar", "una"), (
        _relation("habitat", "caves, forests, rivers, deserts, swamps, meadows, mountains, lakes, reefs, islands, cliffs, dunes",
                  "lives in {v} / makes its home in {v} / dwells in {v}", "Where does the {e} live?"),
        _relation("food", "seeds, insects, grass, fish, berries, roots, eggs, leaves, worms, nuts, snails, moss",
                  "eats {v} / feeds on {v} / lives on {v}", "What does the {e} eat?"),
        _relation("colour", _COLOURS, "is {v} / has {v} skin / wears a {v} coat", "What colour is the {e}?"),
        _relation("enemy", "the fox, the hawk, the wolf, the snake, the owl, the bear, the cat, the eagle, the pike, the lynx, the crow, the stoat",
                  "is hunted by {v} / fears {v} / hides from {v}", "Which animal hunts the {e}?"),
        _relation("active time", "at dawn, at noon, at dusk, at night, after rain, before storms, in winter, in summer, in spring, in autumn, at high tide, at full moon",
                  "is active {v} / comes out {v} / moves about {v}", "When is the {e} active?"),
        _relation("defence", "spines, speed, poison, ink, armour, smell, horns, claws, silence, teeth, venom, noise",
                  "defends itself with {v} / relies on {v} / protects itself with {v}", "How does the {e} defend itself?"),
    )),
    "history": Subject("ruler", ("ric", "wald", "mund", "bert"), (
        _relation("realm", "Astria, Belmar, Corvane, Dunmere, Elsin, Farrow, Galdor, Hestia, Ister, Jorune, Kelland, Lorne",
                  "ruled {v} / was crowned in {v} / sat on the throne of {v}", "Which realm did {e} rule?"),
        _relation("deed", "built roads, freed slaves, dug canals, burned ships, founded schools, lowered taxes, raised walls, minted coins, wrote laws, drained marshes, planted forests, opened mines",
                  "{v} / is remembered because he {v} / first of all {v}", "What did {e} do?"),
        _relation("title", "the Bold, the Wise, the Cruel, the Short, the Silent, the Old, the Lame, the Pious, the Proud, the Gentle, the Rich, the Mad",
                  "was called {v} / bore the name {v} / is known as {v}", "What was {e} called?"),
        _relation("enemy", "the Norrans, the Hulls, the Veskers, the Tarn, the Ombers, the Skane, the Pelts, the Drovers, the Rooks, the Masons, the Arrans, the Gauds",
                  "fought {v} / made war on {v} / was at war with {v}", "Whom did {e} fight?"),
        _relation("death", "of fever, in battle, at sea, in prison, in bed, of hunger, by poison, in exile, by fire, of grief, on a hunt, in a duel",
                  "died {v} / met death {v} / ended his life {v}", "How did {e} die?"),
        _relation("emblem", "a lion, a rose, a ship, a star, a crown, a sword, a tree, a stag, a key, a wheel, a sun, a boar",
                  "carried {v} on his shield / chose {v} as his emblem / had {v} on his flag", "What was on the shield of {e}?"),
    )),
    "astronomy": Subject("planet", ("ix", "eon", "os", "ara"), (
        _relation("star", "Alvar, Betrix, Corona, Deneth, Electra, Fomal, Gemma, Hadar, Izar, Jabbah, Kitalph, Lesath",
                  "goes round {v} / circles {v} / belongs to {v}", "Which star does {e} go round?"),
        _relation("surface", "ice, sand, lava, rock, water, dust, metal, gas, clay, chalk, glass, ash",
                  "is covered with {v} / is made of {v} / consists of {v}", "What is {e} covered with?"),
        _relation("moons", "no moons, one moon, two moons, three moons, four moons, five moons, six moons, seven moons, eight moons, nine moons",
                  "has {v} / is followed by {v} / keeps {v}", "How many moons does {e} have?"),
        _relation("colour", _COLOURS, "shines {v} / looks {v} / appears {v} in the sky", "What colour does {e} shine?"),
        _relation("discoverer", "Ames, Bruno, Cole, Dahl, Ekman, Frost, Gray, Holt, Ibsen, Jung, Klein, Lund",
                  "was discovered by {v} / was first seen by {v} / was found by {v}", "Who discovered {e}?"),
        _relation("size", "very small, small, tiny, large, very large, huge, vast, of middle size, quite small, rather large",
                  "is {v} / seems {v} / is said to be {v}", "How big is {e}?"),
    )),
    "music": Subject("composer", ("ini", "ovsky", "elli", "mann"), (
        _relation("instrument", "the flute, the harp, the drum, the violin, the organ, the horn, the lute, the piano, the cello, the bell, the oboe, the trumpet",
                  "played {v} / wrote for {v} / was a master of {v}", "Which instrument did {e} play?"),
        _relation("home", "Rome, Paris, Vienna, London, Prague, Venice, Berlin, Madrid, Warsaw, Lisbon, Athens, Dublin",
                  "lived in {v} / worked in {v} / settled in {v}", "Where did {e} live?"),
        _relation("form", "waltzes, hymns, operas, marches, songs, dances, masses, ballads, fugues, suites, carols, rounds",
                  "composed {v} / wrote {v} / was praised for {v}", "What did {e} compose?"),
        _relation("teacher", "Abel, Bond, Crane, Drake, Elgin, Fane, Gold, Hale, Irwin, Jarvis, Kemp, Lamb",
                  "was taught by {v} / was a pupil of {v} / learned from {v}", "Who taught {e}?"),
        _relation("patron", "a duke, a queen, a bishop, a banker, a king, a widow, a general, a baker, a prince, a merchant, a judge, a doctor",
                  "was paid by {v} / served {v} / worked for {v}", "Who paid {e}?"),
        _relation("habit", "drank tea, kept bees, collected stamps, grew roses, walked at night, slept late, bred dogs, played chess, painted birds, told jokes, baked bread, read novels",
                  "{v} / often {v} / is said to have {v}", "What did {e} do every day?"),
    )),
    "chemistry": Subject("mineral", ("ite", "ium", "ane", "ol"), (
        _relation("colour", _COLOURS, "is {v} / looks {v} / has a {v} gleam", "What colour is {e}?"),
        _relation("use", "paint, soap, lamps, steel, medicine, glue, bricks, jewels, mirrors, ink, fuel, pottery",
                  "is used for {v} / serves to make {v} / goes into {v}", "What is {e} used for?"),
        _relation("source", "mines, springs, volcanoes, sea water, river mud, old bones, plant ash, hot wells, ice caves, sand pits, coal seams, tree bark",
                  "comes from {v} / is taken from {v} / is won from {v}", "Where does {e} come from?"),
        _relation("solvent", "water, oil, vinegar, alcohol, acid, milk, tar, honey, lye, brine, ether, wine",
                  "dissolves in {v} / melts away in {v} / can be dissolved in {v}", "In what does {e} dissolve?"),
        _relation("smell", "almonds, roses, smoke, garlic, lemons, earth, fish, mint, rubber, apples, pepper, leather",
                  "smells of {v} / has the smell of {v} / gives off a smell of {v}", "What does {e} smell of?"),
        _relation("danger", "burns, blindness, sleep, fever, rust, cracks, fires, rashes, cramps, headaches, stains, floods",
                  "causes {v} / may cause {v} / can bring {v}", "What does {e} cause?"),
    )),
}  # fmt: skip
