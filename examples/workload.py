"""Requests as a chat service gets them: a few system prompts, many questions, and some questions again and again."""

from typing import NamedTuple

import numpy as np

from examples.text import Tokenizer

SYSTEM_PROMPTS = (
    "You are the help desk of a public library. Answer in one short sentence. Books are lent for four weeks, films for "
    "one. The house is open from nine to six, on Saturdays from ten to two.",
    "You help passengers of a small ferry line. Be brief and polite. Ferries leave on the hour from six to midnight, "
    "dogs travel free, and bicycles need a ticket of their own.",
    "You are a cook who gives advice by telephone. Name amounts in grams and times in minutes, warn of hot oil, and "
    "never ask for more than five ingredients.",
)
QUESTIONS = (
    "May I bring my dog?",
    "What do I need to bring along?",
    "Is there anything for children?",
    "What would you do on a rainy Sunday?",
    "I have only one hour, is that enough?",
    "Which one do you like best, and why?",
)
FOLLOW_UP = "And if I come a day later?"


class Work(NamedTuple):
    """One request."""

    prompt_ids: list[int]
    max_new_tokens: int


def draw(tokenizer: Tokenizer, count: int, seed: int, shortest: int, longest: int) -> list[Work]:
    """`count` requests, their system prompts, questions and lengths drawn by `seed`.

    Texts may have `shortest` to `longest` new tokens. A fifth of the requests asks on after a first answer.
    """
    rng = np.random.default_rng(seed)
    works = []
    for _ in range(count):
        text = turn("system", rng.choice(SYSTEM_PROMPTS)) + turn("user", rng.choice(QUESTIONS))
        if rng.random() < 0.2:
            text += turn("assistant", "Yes.") + turn("user", FOLLOW_UP)
        ids = tokenizer.encode(f"{text}<|im_start|>assistant\n")
        works.append(Work(ids, int(rng.integers(shortest, longest + 1))))
    return works


def turn(role: str, text: str) -> str:
    """One message of a chat, in the form that SmolLM2 was trained on."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"
