"""The tiny pair's language: short animal stories, and lines of multiplication and addition.

Everything is drawn from one seeded `random.Random`, so a text is a function of its seed. The stories contain relations
that a deep model can learn but a shallow one finds hard: names, pronouns, things and places return sentences later, the
kind of trouble determines which animal can help, and there are small sums.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

END_OF_TEXT = "<|endoftext|>"

NAMES = {
    "he": "Tom Ben Max Leo Sam Otto Finn Hugo Oscar Theo Jack Paul Felix Emil Noah Gus".split(),
    "she": "Mia Anna Lily Rosa Ella Nora Ida Clara Zoe Emma Lucy Greta Ruby Alma Maya Hazel".split(),
}
POSSESSIVE = {"he": "his", "she": "her"}
OBJECTIVE = {"he": "him", "she": "her"}

# The ability of each kind of animal. It decides in which kinds of trouble the animal can help.
ABILITY = {
    "bird": "fly", "owl": "fly", "crow": "fly", "duck": "swim", "otter": "swim", "frog": "swim", "fish": "swim",
    "mole": "dig", "badger": "dig", "rabbit": "dig", "squirrel": "climb", "cat": "climb", "monkey": "climb",
    "bear": "push", "horse": "push", "ox": "push",
}  # fmt: skip
HEROES = "mouse fox hedgehog goat lamb puppy kitten pig hen turtle".split()

CHARACTER = "little brave shy clever kind young quiet cheerful curious gentle lazy proud".split()
WEATHER = "sunny rainy windy cold warm foggy snowy bright".split()
TIME = ["morning", "afternoon", "evening", "day"]
PLACE = "forest river village garden lake mill hill meadow harbour bridge castle farm orchard market".split()
THING = (
    "ball kite lantern drum key hat basket book bell boat scarf cup flute map ring umbrella".split()
)
COLOUR = "red blue green yellow white silver golden purple".split()
FOOD = "apple pear cake nut plum cookie carrot berry potato egg".split()
FEELING = ["sad", "worried", "tired", "angry", "lonely"]
GLAD = ["happy", "proud", "glad", "thankful", "merry"]

# Each kind of trouble: the ability that helps, what happened to the thing, and what the friend does.
TROUBLE = [
    ("fly", "was blown onto the roof of the {place}", "flew up to the roof and brought it down"),
    ("fly", "hung from the top of a tall tower", "flew to the top of the tower and picked it up"),
    ("swim", "fell into the deep water", "swam out and pulled it from the water"),
    ("swim", "was drifting away on the river", "swam after it and caught it in the river"),
    ("dig", "was buried under the sand", "dug in the sand until it came to light"),
    ("dig", "had slipped into a deep hole", "dug a tunnel down to the hole"),
    ("climb", "was stuck in a tall tree", "climbed the tall tree and shook it free"),
    ("climb", "lay on a narrow ledge", "climbed to the narrow ledge and threw it down"),
    ("push", "was trapped under a heavy stone", "pushed the heavy stone away"),
    ("push", "stood behind a locked gate", "pushed the gate until it opened"),
]
MORAL = [
    "asked a friend when something was hard",
    "took good care of the {thing}",
    "shared {poss} food with {friend}",
    "told the story of the {place}",
    "knew that a friend is worth more than a {colour} {thing}",
    "walked to the {place} with {friend}",
]


@dataclass(frozen=True)
class Character:
    """A character of a story; `kind` is the animal, and `pronoun` is "he" or "she"."""

    name: str
    kind: str
    pronoun: str
    trait: str


def article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def plural(word: str, count: int) -> str:
    if count == 1:
        return word
    if word.endswith("y"):
        return word[:-1] + "ies"
    return word + ("es" if word.endswith("o") else "s")


def story(rng: random.Random) -> str:
    """A story of about a hundred words: a hero with a thing, a trouble, a friend who helps, and an end that mentions
    the beginning.
    """
    pick = rng.choice
    ability, mishap, rescue = pick(TROUBLE)
    hero = Character("", pick(HEROES), pick(("he", "she")), pick(CHARACTER))
    hero = Character(pick(NAMES[hero.pronoun]), hero.kind, hero.pronoun, hero.trait)
    friend_pronoun = pick(("he", "she"))
    friend = Character(
        pick([name for name in NAMES[friend_pronoun] if name != hero.name]),
        pick([kind for kind, can in ABILITY.items() if can == ability]),
        friend_pronoun,
        pick([trait for trait in CHARACTER if trait != hero.trait]),
    )
    place, thing, colour, food = pick(PLACE), pick(THING), pick(COLOUR), pick(FOOD)
    words = {
        "hero": hero.name, "kind": hero.kind, "he": hero.pronoun, "He": hero.pronoun.capitalize(),
        "poss": POSSESSIVE[hero.pronoun], "him": OBJECTIVE[hero.pronoun], "trait": hero.trait,
        "a_trait": article(hero.trait), "friend": friend.name, "friend_kind": friend.kind,
        "friend_he": friend.pronoun, "friend_He": friend.pronoun.capitalize(), "friend_a_trait": article(friend.trait),
        "place": place, "thing": thing, "colour": colour, "a_colour": article(colour), "feeling": pick(FEELING),
        "glad": pick(GLAD), "weather": pick(WEATHER), "time": pick(TIME), "foods": plural(food, 2),
    }  # fmt: skip

    def say(*choices: str) -> str:
        return pick(choices).format(**words)

    sentences = [
        say(
            "Once upon a time there was {a_trait} {kind} named {hero}.",
            "{hero} was {a_trait} {kind} who lived near the {place}.",
            "Near the {place} lived {a_trait} {kind} called {hero}.",
            "One {weather} {time}, {a_trait} {kind} named {hero} went to the {place}.",
        ),
        say(
            "{He} had {a_colour} {thing} and took it everywhere.",
            "More than anything, {he} loved {poss} {colour} {thing}.",
            "In {poss} bag {he} carried {a_colour} {thing}.",
        ),
        say("One {weather} {time}, ", "But one {time}, ", "Then, all at once, ")
        + say(f"the {{thing}} {mishap}."),
        say(
            "{hero} was very {feeling}.",
            "This made {hero} {feeling}.",
            "{hero} sat down and felt {feeling}.",
        ),
        say(
            "Soon {friend} came along, {friend_a_trait} {friend_kind}.",
            "On the way {he} met {friend_a_trait} {friend_kind} named {friend}.",
            "Just then {friend_a_trait} {friend_kind} called {friend} walked by.",
        ),
    ]
    if rng.random() < 0.7:
        sentences.append(
            say(
                '"Why are you so {feeling}?" asked {friend}.',
                '"What is the matter, {hero}?" asked the {friend_kind}.',
                '"Can I help you?" said {friend}.',
            )
        )
        sentences.append(
            say(
                '"I cannot reach my {colour} {thing}," said {hero}.',
                '"My {thing} is gone," said the {kind}.',
                '"I want my {thing} back," {hero} answered.',
            )
        )
    sentences.append(
        say("{friend} smiled and ", "Without a word, the {friend_kind} ", "So {friend} ")
        + rescue
        + "."
    )
    if rng.random() < 0.6:
        had, given = rng.randint(1, 9), rng.randint(1, 9)
        sentences.append(
            f"{hero.name} had {had} {plural(food, had)}, and {friend.name} had {given}. "
            f"Together they had {had + given} {plural(food, had + given)}."
        )
    sentences.append(
        say(
            "{hero} was {glad} to hold the {colour} {thing} again.",
            '"Thank you, {friend}!" said {hero}, and {he} was {glad}.',
            "Now the {kind} was {glad}, and so was the {friend_kind}.",
        )
    )
    sentences.append(
        say(
            "In the evening {hero} and {friend} sat near the {place} and ate {foods}.",
            "They went back to the {place} and shared the {foods}.",
            "The {kind} and the {friend_kind} danced all the way to the {place}.",
        )
    )
    sentences.append(say("From that day on, {hero} always ") + say(*MORAL) + ".")
    return " ".join(sentences)


def sums(rng: random.Random, sign: str, lines: int) -> str:
    """Solved products (`sign="*"`) or additions (`"+"`) of numbers from 1 to 99, one per line: `37 * 85 = 3145`."""
    rows = []
    for _ in range(lines):
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        rows.append(f"{a} {sign} {b} = {a * b if sign == '*' else a + b}\n")
    return "".join(rows)


def documents(seed: int, products: float, additions: float) -> Iterator[str]:
    """Yield texts without end; each ends in END_OF_TEXT.

    Args:
        products: the share of documents that consist of products. All documents have about the same length.
        additions: the share that consist of additions. All other documents are stories.
    """
    rng = random.Random(seed)
    while True:
        kind = rng.random()
        if kind < products:
            text = sums(rng, "*", rng.randint(6, 16))
        elif kind < products + additions:
            text = sums(rng, "+", rng.randint(6, 16))
        else:
            text = story(rng) + "\n"
        yield text + END_OF_TEXT
