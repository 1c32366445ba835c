"""Short prompts with an answer to look for: eight families of 35, for studies over many prompts.

Each prompt stops right before one token. Where that token is known beforehand, from the world, the language
or the program itself, it is written down as ``answer`` and the source is ``"fact"``. Where the text leaves it
open, the answer is None, the source ``"model"``, and the target is what the model ranks first
(``targets=None``).

Every answer is one token of the tokenizers of SmolLM2 and Gemma-3, also when joined to its text. Both demo
models give it a probability of at least 0.05, so that an ablation has something to suppress; it is their top
token on about nine prompts in ten, least often in arithmetic. No text ends in white space. An answer brings
its leading space (``" Paris"``), except where the text stops inside a number, a name, a quotation or
brackets (``"2+2="``, ``"4"``).
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from ._checks import check_choice, check_positive, fail


@dataclass(frozen=True)
class Prompt:
    """A text, the family it belongs to and the token that should follow, None for the model's own."""

    text: str
    family: str
    answer: str | None

    @property
    def source(self) -> Literal["fact", "model"]:
        """Where the answer comes from: known beforehand, or the model's own top token."""
        return "model" if self.answer is None else "fact"


def family(name: str) -> tuple[Prompt, ...]:
    """The prompts of one of ``FAMILIES``; ValueError for another name."""
    check_choice("name", name, FAMILIES)
    return tuple(prompt for prompt in PROMPTS if prompt.family == name)


def sample(n: int, seed: int = 0) -> tuple[Prompt, ...]:
    """``n`` different prompts, the same for the same seed, family sizes as even as ``n`` allows.

    The families take turns, so a smaller sample is the beginning of a larger one with the same seed. The
    global random state is neither read nor changed. Raises ValueError unless 1 ≤ n ≤ len(PROMPTS).
    """
    if check_positive("n", n) > len(PROMPTS):
        fail("n", f"at most the {len(PROMPTS)} prompts there are", n, "add prompts of your own")
    rng = random.Random(seed)
    # Sorting by random() rather than shuffling: only random() is promised to repeat across Python versions.
    stacks = [sorted(family(name), key=lambda _: rng.random()) for name in FAMILIES]
    stacks.sort(key=lambda _: rng.random())
    turns = (prompt for turn in zip_longest(*stacks) for prompt in turn if prompt is not None)
    return tuple(prompt for prompt, _ in zip(turns, range(n), strict=False))


def texts(prompts: Iterable[Prompt] | None = None) -> list[str]:
    """The texts of some prompts, of all when left out: an ``input`` for ``ig_lens`` and its neighbours."""
    return [prompt.text for prompt in (PROMPTS if prompts is None else prompts)]


def _filled(template: str, answers: dict[str, str]) -> Iterator[tuple[str, str]]:
    """One pair of text and answer per word that fills the gap."""
    return ((template.format(word), answer) for word, answer in answers.items())


_CAPITALS = (
    *_filled(
        "The capital of {} is",
        {
            "France": " Paris",
            "Germany": " Berlin",
            "Japan": " Tokyo",
            "Peru": " Lima",
            "Afghanistan": " Kabul",
            "Scotland": " Edinburgh",
            "the United Kingdom": " London",
        },
    ),
    *_filled(
        "The capital city of {} is called",
        {
            "Italy": " Rome",
            "Greece": " Athens",
            "Kenya": " Nairobi",
            "Iran": " Tehran",
            "Portugal": " Lisbon",
        },
    ),
    *_filled(
        "The capital of {} is the city of",
        {"Chile": " Santiago", "Poland": " Warsaw", "Belgium": " Brussels", "South Korea": " Seoul"},
    ),
    *_filled(
        "The government of {} sits in the capital,",
        {"Canada": " Ottawa", "Spain": " Madrid", "Cuba": " Havana", "Ireland": " Dublin"},
    ),
    *_filled(
        "Italy: Rome. Japan: Tokyo. {}:", {"Norway": " Oslo", "Russia": " Moscow", "Hungary": " Budapest"}
    ),
    *_filled(
        "{} is the capital of",
        {"Cairo": " Egypt", "Bucharest": " Romania", "Beijing": " China", "Copenhagen": " Denmark"},
    ),
    *_filled(
        "Rome is the capital of Italy, and {} is the capital of",
        {"Stockholm": " Sweden", "Hanoi": " Vietnam", "Canberra": " Australia"},
    ),
    ("He moved to Baghdad, the capital of", " Iraq"),
    ("They flew to Vienna, the capital of", " Austria"),
    ("We spent a week in Prague, the capital of the Czech", " Republic"),
    ("The capital of Spain is Madrid, and the capital of England is", " London"),
    ("Tokyo belongs to Japan, Paris to France and Berlin to", " Germany"),
)

_FACTS = (
    *_filled("The chemical symbol for {} is", {"gold": " Au", "iron": " Fe"}),
    *_filled("The holy book of {} is the", {"Islam": " Quran", "Christianity": " Bible"}),
    *_filled("The currency of the United {} is the", {"States": " dollar", "Kingdom": " pound"}),
    ("The planet with the most famous rings is", " Saturn"),
    ("Of all the planets, the largest one is", " Jupiter"),
    ("The star at the centre of our solar system is the", " Sun"),
    ("The Moon moves around the", " Earth"),
    ("Water is made of hydrogen and", " oxygen"),
    ("At zero degrees Celsius, water turns into", " ice"),
    ("Diamonds and coal are both made of the element", " carbon"),
    ("The largest ocean on Earth is the", " Pacific"),
    ("The longest river in Africa is the", " Nile"),
    ("The highest mountain in the world is Mount", " Everest"),
    ("The Colosseum is in the city of", " Rome"),
    ("The river Thames flows through the city of", " London"),
    ("The theory of evolution was proposed by Charles", " Darwin"),
    ("The first person to walk on the Moon was Neil", " Armstrong"),
    ("Pride and Prejudice was written by Jane", " Austen"),
    ("The painter of Guernica was Pablo", " Picasso"),
    ("The first president of the United States was George", " Washington"),
    ("The Beatles were a band from", " Liverpool"),
    ("The organ that pumps blood is the", " heart"),
    ("We see with our eyes and hear with our", " ears"),
    ("A spider is not an insect, because it has eight", " legs"),
    ("Penguins are birds that cannot", " fly"),
    ("A baby cat is called a", " kitten"),
    ("In England people speak English, and in Egypt people speak", " Arabic"),
    ("In Germany people speak German, and in Brazil people speak", " Portuguese"),
    ("Today is Friday, so tomorrow is", " Saturday"),
    ("January, February, March,", " April"),
    ("The Second World War ended in the year 194", "5"),
    ("The First World War began in the year 191", "4"),
)

_ARITHMETIC = (
    *_filled("1+1=2, 2+2=4, {}=", {"2+3": "5", "3+1": "4", "4+3": "7", "4+4": "8", "5+1": "6", "5+4": "9"}),
    *_filled("5-1=4, 6-3=3, {}=", {"4-3": "1", "7-3": "4", "7-5": "2", "9-4": "5"}),
    *_filled("2*2=4, 2*3=6, {}=", {"2*4": "8", "3*2": "6", "3*3": "9"}),
    *_filled("{}=", {"1+1": "2", "2+2": "4", "7-6": "1"}),
    *_filled("{},", {"1,2,3,4": "5", "2,4,6": "8", "3,4,5,6,7": "8", "5,4,3": "2"}),
    *_filled(
        "{},",
        {
            "One, two, three": " four",
            "Three, four, five": " six",
            "Five, six, seven": " eight",
            "Five, four, three": " two",
            "One, three, five": " seven",
            "Two, four, six": " eight",
            "Twenty, thirty, forty": " fifty",
            "Third, fourth, fifth": " sixth",
        },
    ),
    ("One plus one equals two. Four plus four equals", " eight"),
    ("Six minus three equals three. Four minus two equals", " two"),
    ("Two times two equals four. Two times three equals", " six"),
    ("Half of four is two. Half of eight is", " four"),
    ("A triangle has three sides and a square has", " four"),
    ("A dog has four legs and a bird has", " two"),
    ("We had two dogs and got one more, so now we have", " three"),
)

_ANTONYMS = (
    *_filled(
        "The opposite of {} is",
        {
            "hot": " cold",
            "black": " white",
            "good": " bad",
            "war": " peace",
            "day": " night",
            "open": " closed",
        },
    ),
    *_filled(
        'The antonym of "{}" is "',
        {
            "early": "late",
            "wet": "dry",
            "high": "low",
            "front": "back",
            "inside": "outside",
            "positive": "negative",
            "minimum": "maximum",
            "success": "failure",
        },
    ),
    ("Day is to night as white is to", " black"),
    ("Up is to down as left is to", " right"),
    ("big - small, high - low, long -", " short"),
    ("true - false, good - evil, yes -", " no"),
    ("love - hate, war - peace, life -", " death"),
    ("One twin is tall and the other is", " short"),
    ("The road is not wide; it is", " narrow"),
    ("He is not asleep; he is", " awake"),
    ("If it is not the beginning, it is the", " end"),
    ("He is not my enemy but my", " friend"),
    ("First the good news, then the", " bad"),
    ("The plan has its advantages and", " disadvantages"),
    ("You must choose between right and", " wrong"),
    ("The sun rises in the east and sets in the", " west"),
    ("They travelled from north to", " south"),
    ("He turned the radio off, and then she turned it back", " on"),
    ("She switched the lamp on, and he switched it", " off"),
    ("In business there are buyers and", " sellers"),
    ("The shop opens at nine in the morning and", " closes"),
    ("She nodded for yes and shook her head for", " no"),
    ("The law is the same for rich and", " poor"),
)

_PHRASES = (
    ("Once upon a", " time"),
    ("On the other", " hand"),
    ("Thank you very", " much"),
    ("To make a long story", " short"),
    ("And last but not", " least"),
    ("Welcome, ladies and", " gentlemen"),
    ("We wish you a merry Christmas and a happy New", " Year"),
    ("My grandmother says it is better late than", " never"),
    ("They say that practice makes", " perfect"),
    ("As they say, actions speak louder than", " words"),
    ("We all know the early bird catches the", " worm"),
    ("The proverb says that honesty is the best", " policy"),
    ("You should not judge a book by its", " cover"),
    ("You cannot teach an old dog new", " tricks"),
    ("Do not put all your eggs in one", " basket"),
    ("I wanted to stay dry, but it was raining cats and", " dogs"),
    ("This is easier said than", " done"),
    ("This problem is only the tip of the", " iceberg"),
    ("The test was easy; it was a piece of", " cake"),
    ("He told a joke to break the", " ice"),
    ("Please answer as soon as", " possible"),
    ("They read the story of Romeo and", " Juliet"),
    ("We learned by trial and", " error"),
    ("Prices are set by supply and", " demand"),
    ("They came home safe and", " sound"),
    ("The company is back to square", " one"),
    ("We are all in the same", " boat"),
    ("He hit the nail on the", " head"),
    ("You have to take it with a grain of", " salt"),
    ("It costs an arm and a", " leg"),
    ("She knows the town like the back of her", " hand"),
    ("She turned a blind", " eye"),
    ("It was love at first", " sight"),
    ("I told him to mind his own", " business"),
    ("In this house you get the best of both", " worlds"),
)

_GRAMMAR = (
    *_filled(
        "{}, two",
        {
            "One cat, two cats; one child": " children",
            "One car, two cars; one man": " men",
            "One dog, two dogs; one mouse": " mice",
            "One hand, two hands; one foot": " feet",
            "One chair, two chairs; one knife": " knives",
        },
    ),
    ("Today I go, yesterday I", " went"),
    ("Today we eat, yesterday we", " ate"),
    ("see, saw, seen; go, went,", " gone"),
    ("walk, walked; talk, talked; run,", " ran"),
    ("help, helped; ask, asked; think,", " thought"),
    ("I walk, you walk, he", " walks"),
    ("I am tall, you are tall, and she", " is"),
    ("I was, you were, she", " was"),
    ("The cat is asleep and the dogs", " are"),
    ("The house was old and the trees", " were"),
    ("The apples were sweet and the pear", " was"),
    ("The keys are on the table, aren't", " they"),
    ("It is cold today, isn't", " it"),
    ("My sister is clever, isn't", " she"),
    ("He hurt himself, and she hurt", " herself"),
    ("The man lost his hat and the woman lost", " her"),
    ("Mary lost her keys, and Tom lost", " his"),
    ("It was neither hot", " nor"),
    ("You can have either tea", " or"),
    ("He speaks both English", " and"),
    ("She is as clever", " as"),
    ("She is taller", " than"),
    ("The book consists", " of"),
    ("The author of these books", None),
    ("The price of the apples", None),
    ("The road between the two villages", None),
    ("The windows of the house", None),
    ("She has never", None),
    ("He insisted", None),
    ("If it rains tomorrow, we", None),
)

_CODE = (
    ("import numpy as", " np"),
    ("import pandas as", " pd"),
    ("array = np.array([1, 2, 3])\nmean = np.", "mean"),
    ("left, right = right,", " left"),
    ("def double(n):\n    return 2 *", " n"),
    ('words = ["a", "b"]\nfor i, word in', " enumerate"),
    ('data = {"a": 1}\nfor key, value in data.', "items"),
    ('print(f"Hello, {name}")\nprint(f"Goodbye, {', "name"),
    ('file = open("notes.txt")\ntext = file.read()\nfile.', "close"),
    ("for i in range(10):\n    print(", "i"),
    ("numbers = [1, 2, 3]\nfor number in", " numbers"),
    ("result = []\nfor item in items:\n    result.", "append"),
    ("def multiply(x, y):\n    return x *", " y"),
    ("def area(width, height):\n    return width *", " height"),
    ("def average(values):\n    return sum(values) / len(", "values"),
    ("def factorial(n):\n    return n * factorial(", "n"),
    ("def first(items):\n    return items[", "0"),
    ("def last(items):\n    return items[-", "1"),
    ("def positive(x):\n    if x > 0:\n        return True\n    return", " False"),
    ("def maximum(a, b):\n    if a > b:\n        return a\n    else:\n        return", " b"),
    ("class Cat:\n    def __init__(self, name):\n        self.name =", " name"),
    ("try:\n    value = int(text)\nexcept", " ValueError"),
    ("a = 1\nb = 2\na, b = b,", " a"),
    ("values = sorted(values, reverse=", "True"),
    ("SELECT name FROM users WHERE age > 30 ORDER", " BY"),
    ("SELECT city, COUNT(*) FROM users GROUP", " BY"),
    ("int x = 3;\nint y = 4;\nint z = x +", " y"),
    ("for (let i = 0; i < items.", "length"),
    ("let total = 0;\nfor (const x of items) {\n  total +=", " x"),
    ("if (a > b) {\n  return a;\n} else {\n  return", " b"),
    ("import os\nimport", None),
    ("if not isinstance(x,", None),
    ("y = x if x > 0 else", None),
    ("if x > limit:\n    x =", None),
    ("class Stack:\n    def push(self,", None),
)

_CONTINUATION = (
    "The old man sat down on the bench and",
    "When the rain stopped, the children ran",
    "She opened the letter and began to",
    "The train was late, so we",
    "He looked out of the window and saw",
    "In the middle of the night, she heard",
    "The teacher asked the class to",
    "On the way home, I met",
    "The small boat drifted slowly towards",
    "The doctor said that the patient",
    "For breakfast I usually have",
    "The new bridge will be finished",
    "Scientists have found that",
    "The team lost the game because",
    "To make a good soup, you need",
    "The first thing I noticed was",
    "In winter, the lake is covered with",
    "The company announced that it",
    "The price of bread has",
    "The shop on the corner sells",
    "The road through the forest leads to",
    "She put the keys in her",
    "The report shows that the number of",
    "If you want to learn a language, you should",
    "He poured himself a cup of",
    "She closed her eyes and took a deep",
    "They sat down at the table and started to",
    "The cat climbed up the",
    "I brush my teeth before going to",
    "He turned the key and opened the",
    "We waited for more than an",
    "The water was too cold to",
    "He did not know what to",
    "They have been married for more than ten",
    "We had not seen each",
)

_ANSWERED = {
    "capitals": _CAPITALS,
    "facts": _FACTS,
    "arithmetic": _ARITHMETIC,
    "antonyms": _ANTONYMS,
    "phrases": _PHRASES,
    "grammar": _GRAMMAR,
    "code": _CODE,
    "continuation": tuple((text, None) for text in _CONTINUATION),
}

FAMILIES = tuple(_ANSWERED)

PROMPTS = tuple(Prompt(text, name, answer) for name, pairs in _ANSWERED.items() for text, answer in pairs)
"""All prompts, family by family."""
