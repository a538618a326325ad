"""Prompts to train drafters on, composed from templates: six kinds of work, thousands of prompts each, no file to ship.

A drafter learns to guess what its target says, so it is trained on what the target itself answers. The prompts only have to
be many and of the kinds that will be asked; they share no subject with the prompts of data/prompts, on which drafters are
measured (tests/test_training.py compares them word by word).
"""

from __future__ import annotations

import random
import re
from collections.abc import Container, Iterator

from ..prompts import WORKLOADS

WORDS: dict[str, str] = {
    "verb": "load save parse format merge split count filter sort find remove update check build send fetch encode decode group",
    "noun": "record message token config header user order task event node path line report image cell ticket sensor",
    "kind": "list dict set string file queue tree table stream buffer cache graph",
    "class": "Parser Reader Writer Handler Manager Session Client Worker Registry Formatter Scheduler Loader Monitor Router Ledger",
    "type": "int str float bool list dict bytes",
    "module": "os sys json re math time random logging shutil socket struct hashlib",
    "name": "Marta Jonas Priya Oskar Lena Tariq Nadia Pavel Ingrid Samuel Rosa Hugo Aisha Viktor Clara",
    "city": "Lisbon Oslo Quito Nairobi Kyoto Graz Tampere Cork Lima Hanoi Leeds Porto",
    "object": "lamp kettle chair violin ladder camera basket mirror saddle hammock teapot drum",
    "animal": "heron badger tortoise goat falcon otter beetle donkey raven seal",
    "person": "gardener pilot baker teacher nurse carpenter painter sailor clockmaker farmer judge beekeeper",
    "place": "harbour desert island castle cave orchard swamp museum lake attic workshop village",
    "feeling": "curious tired proud lonely stubborn cheerful jealous patient",
    "topic": "rainbows volcanoes batteries magnets glaciers earthquakes tides bees yeast planets compost inflation engines",
    "skill": "knitting swimming juggling chess sketching pottery typing dancing sailing photography",
    "food": "lentils potatoes mushrooms noodles salmon chickpeas pumpkin tofu",
    "language": "French German Spanish Italian Portuguese",
    "colour": "red green white black yellow grey brown",
    "day": "Monday Tuesday Wednesday Thursday Friday Sunday",
}
TEMPLATES: dict[str, tuple[str, ...]] = {
    "code": (
        'def {verb}_{noun}({noun}, {kind}):\n    """{Verb} the {noun} and return a {kind}."""',
        "def {verb}_{noun}s({noun}s):\n    result = []\n    for {noun} in {noun}s:",
        'class {Noun}{class}:\n    """A {class} of {noun}s."""\n\n    def __init__(self, {noun}, {kind}=None):',
        "import {module}\nimport {module}\n\ndef {verb}({noun}):",
        "    def {verb}_{noun}(self, {noun}):\n        if {noun} is None:\n            raise ValueError(",
        "    def test_{verb}_{noun}(self):\n        {noun} = {Noun}()\n        self.assertEqual(",
        "async def {verb}_{noun}(client: {class}, {noun}: {type}) -> {type}:",
        "try:\n    {noun} = {verb}({noun}_{kind})\nexcept",
        "from dataclasses import dataclass\n\n@dataclass\nclass {Noun}:\n    {noun}: {type}\n    {kind}: {type} =",
        "with open({noun}_path) as file:\n    for line in file:\n        {noun} = line",
    ),
    "documentation": (
        'def {verb}_{noun}({noun}, *, {kind}=None):\n    """{Verb} a {noun}.\n\n    If {kind} is given,',
        "class {Noun}{class}({noun}, {kind}=None)\n\n   Return a new {class} for {noun}s. The optional argument {kind} is",
        "The {noun} {class}\n================\n\nA {class} can {verb} any {noun}. It raises an exception if",
        "{Noun} objects\n\n   {verb}({noun})\n      {Verb} the {noun}. Return the {kind} that was",
        "The following options are used to {verb} a {noun}:\n\n-{kind}\n   The {kind} of the {noun}.",
        "New in version 3.{digit}: The {verb}() function accepts a {kind} of {noun}s. See also",
        "In Python, a {kind} of {type} values can be used to {verb} {noun}s. For example,",
    ),
    "structured": (
        '{{"{noun}s": [\n  {{"id": {digit}, "{kind}": "{name}", "age": {digit}}},\n  {{"id": {digit}, "{kind}": "{name}", "age":',
        "name,city,{noun}\n{name},{city},{digit}\n{name},{city},{digit}\n{name},",
        "| name | {noun} | {kind} |\n|---|---|---|\n| {name} | {digit} | {colour} |\n| {name} | {digit} | {colour} |\n|",
        "[{noun}]\n{kind} = {digit}\ncity = {city}\n\n[{noun}.{verb}]\n{kind} = {digit}\ncity =",
        "<{noun}s>\n  <{noun} id=\"{digit}\"><name>{name}</name><city>{city}</city></{noun}>\n  <{noun} id=",
        "{noun}s:\n  - name: {name}\n    {kind}: {digit}\n    colour: {colour}\n  - name: {name}\n    {kind}:",
        "UPDATE {noun}s SET {kind} = {digit} WHERE name = '{name}';\nUPDATE {noun}s SET {kind} = {digit} WHERE name =",
        '{{"{noun}": {{"{kind}": {digit}, "colour": "{colour}"}}, "{object}": {{"{kind}": {digit}, "colour":',
    ),
    "translation": (
        "Translate to {language}: The {person} has lost the key of the {place} on {day}.",
        "Translate to {language}: There are {digit} {object}s in my house, and one of them is {colour}.",
        "Translate to {language}: {name} wants to travel to {city} next {day} with a friend.",
        "Translate to {language}: Where can I buy a {colour} {object}?",
        "Translate to {language}: The {animal} sleeps behind the {place} when it is {feeling}.",
        "Translate to {language}: Yesterday we cooked {food} for the {person}.",
        "Translate to {language}: Can you show me the way to the {place} in {city}?",
    ),
    "story": (
        "Write a short story about a {feeling} {person} who finds a {object} in a {place}.",
        "Write a short story about a {animal} that wants to become a {person}.",
        "Write a tale about {name} and a {colour} {object}.",
        "Write the beginning of a story about a {place} near {city}, where a {animal} lives.",
        "Write a funny story about a {feeling} {animal} and a {feeling} {person}.",
        "Tell a story in which {name} from {city} loses a {object} on a {day}.",
    ),
    "chat": (
        "How do {topic} work?",
        "Can you explain {topic} to a beginner?",
        "I want to learn {skill}. Where should I start?",
        "What can I cook with {food} and {food}?",
        "Give me {digit} tips for {skill}.",
        "My friend {name} is {feeling}. How can I help?",
        "Tell me three facts about {topic}.",
        "What should I see in {city} on a {day}?",
        "How do I clean a {colour} {object}?",
        "Why is {skill} good for people who are {feeling}?",
    ),
}  # fmt: skip


def compose(kind: str, seed: int) -> Iterator[str]:
    """Endlessly many prompts of one kind, drawn by the seed. None ends in white space."""
    chance = random.Random(f"{kind} {seed}")
    while True:
        yield _fill(chance.choice(TEMPLATES[kind]), chance)


def compose_all(number: int, seed: int, without: Container[str] = ()) -> list[tuple[str, str]]:
    """(kind, prompt) pairs, the kinds in turn, no prompt twice and none of `without`."""
    sources = {kind: compose(kind, seed) for kind in WORKLOADS}
    found: dict[str, str] = {}
    while len(found) < number:
        for kind, source in sources.items():
            prompt = next(source)
            if prompt not in without:
                found.setdefault(prompt, kind)
    return [(kind, prompt) for prompt, kind in found.items()][:number]


def _fill(template: str, chance: random.Random) -> str:
    """Each name gets one word a prompt in lists of words, except for those that a template repeats as a list."""
    chosen: dict[str, str] = {}

    def word(match: re.Match[str]) -> str:
        slot = match[1]
        key = slot.lower()
        if key == "digit":
            return str(chance.randint(1, 99))
        fresh = key in ("name", "city", "colour", "food", "module", "feeling") or key not in chosen
        if fresh:
            chosen[key] = chance.choice(WORDS[key].split())
        return chosen[key].capitalize() if slot[0].isupper() else chosen[key]

    return re.sub(r"(?<!{){(\w+)}(?!})", word, template).replace("{{", "{").replace("}}", "}")
