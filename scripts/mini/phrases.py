"""Sentence frames for requests. A request is a bare imperative such as "check the weather".

{a} {b} are requests; {A} capitalizes the first letter. The first tuple of each pair is for
training, the second is held out for the tests.
"""

from __future__ import annotations

ONE = (
    (
        "{A}.",
        "{A}, please.",
        "{A} now.",
        "{A} for me.",
        "{A} for me, please.",
        "{A} now, please.",
        "{A}, thanks.",
        "{A} today.",
        "Please {a}.",
        "Please {a} for me.",
        "Please {a} now.",
        "Please help me {a}.",
        "Now {a}.",
        "Hi, {a}.",
        "Hi, please {a}.",
        "Hi, can you {a}?",
        "Hello, {a}.",
        "Hello, could you {a}?",
        "Can you {a}?",
        "Can you {a} for me?",
        "Can you please {a}?",
        "Could you {a}?",
        "Could you {a} now?",
        "Could you please {a}?",
        "I want to {a}.",
        "I need to {a}.",
        "I need you to {a}.",
        "I want you to {a}.",
        "I would like to {a}.",
        "I have to {a}.",
        "Help me {a}.",
        "Help me to {a}, please.",
        "It is time to {a}.",
        "Today I want to {a}.",
    ),
    (
        "Hello, please {a}.",
        "Hi, I want to {a}.",
        "I would like you to {a}.",
        "Could you help me {a}?",
        "Now please {a}.",
        "Today I need to {a}.",
        "Can you {a} now?",
        "{A} today, please.",
        "I need you to {a}, thanks.",
        "Hello, I have to {a}.",
    ),
)

TWO = (
    (
        "{A} and {b}.",
        "{A} and {b}, please.",
        "{A} and then {b}.",
        "{A}, then {b}.",
        "{A} and also {b}.",
        "{A}. Also {b}.",
        "{A}. Then {b}.",
        "{A}. Please also {b}.",
        "{A}, and {b} too.",
        "{A}, and please {b}.",
        "Please {a} and {b}.",
        "Please {a} and then {b}.",
        "Please {a} and also {b}.",
        "Please {a}, then {b}.",
        "Please {a}. Also {b}.",
        "Please {a}. Then {b}.",
        "First {a}, then {b}.",
        "First {a} and then {b}.",
        "First {a}. Then {b}.",
        "Can you {a} and {b}?",
        "Can you {a} and also {b}?",
        "Can you {a}? Also {b}.",
        "Could you {a} and {b}?",
        "Could you {a} and then {b}?",
        "Hi, {a} and {b}.",
        "Hello, {a} and {b}.",
        "Help me {a} and {b}.",
        "I want to {a} and {b}.",
        "I want to {a} and also {b}.",
        "I need to {a} and {b}.",
        "I need to {a}, then {b}.",
        "I would like to {a} and {b}.",
        "Today I want to {a} and {b}.",
    ),
    (
        "First please {a}, then {b}.",
        "{A}, and also {b}, please.",
        "Could you {a} and also {b}?",
        "Please help me {a} and {b}.",
        "Hi, please {a} and then {b}.",
        "I have to {a} and then {b}.",
        "Hello, {a}. Also {b}.",
        "Now {a} and {b}.",
    ),
)

# lists of two or three values in one request
LISTS = (
    ("{x} and {y}", "both {x} and {y}", "{x} and also {y}", "{x} and then {y}", "{x}, {y} and {z}"),
    ("{x}, {y}", "{x} and {y} too", "{x} and {y} and {z}"),
)

# the user states a fact in an earlier turn: {ref} is "my city", {v} the value
STATED = (
    ("{Ref} is {v}.", "Hi, {ref} is {v}.", "{v} is {ref}.", "Note that {ref} is {v}.", "Hello, {ref} is {v}."),
    ("Today {ref} is {v}.", "Please note that {ref} is {v}."),
)

NOTED = "Noted."
NO_TOOL = "Sorry, no tool can do this."

THOUGHTS = {
    "call": ("I call {calls}.", "I need {calls}.", "The user needs {calls}.", "This is {calls}."),
    "dialogue": ("It is {value}, so I call {tool}.", "I know {value}, now {tool}."),
    "none": ("No tool fits this.", "No listed tool can do this.", "The tools do not fit."),
}
